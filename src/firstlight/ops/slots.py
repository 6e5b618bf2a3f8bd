"""Slots of a state pool: how ops with one state per request read, write and log them.

A pool is [slots, ...]; slot 0 belongs to nobody and an index <= 0 is null: it reads as zeros, and what is written to it is
lost. Slot 0 may hold anything, NaN too, so null rows are replaced and never multiplied away.

On a device, launches must not depend on data, so null rows are written to slot 0. On the CPU looking at the data is free
and copying a state is not, so null rows are left out there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_log(op: str, state_out: Tensor, log: object) -> None:
    """Raise ValueError if both ways of keeping the states inside a step are asked for."""
    if log is not None and state_out.dim() == 2:
        raise ValueError(f"{op}: state_out [R, q] and a log are two ways of keeping states; pass one of them")


def token_requests(query_start: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `tokens` tokens: the request [T], its offset in the request's new tokens [T], whether it is real [T].

    Padding tokens, after query_start[-1], get the last request and an offset past its end.
    """
    index = torch.arange(tokens, device=query_start.device)
    start = query_start.long()
    request = torch.searchsorted(start[1:], index, right=True).clamp(max=len(start) - 2)
    return request, index - start[request], index < start[-1]


def read_slots(pool: Tensor, slot: Tensor) -> Tensor:
    """[slots, ...], [R] -> [R, ...]: a copy of each request's row, zeros where the slot is null."""
    slot = slot.long()
    rows = pool.index_select(0, slot.clamp(min=0))
    null = slot <= 0
    if pool.device.type == "cpu":
        rows[null] = 0
        return rows
    return rows.masked_fill_(null.view(-1, *[1] * (rows.dim() - 1)), 0)


def write_slots(pool: Tensor, slot: Tensor, rows: Tensor, index: Tensor | None = None) -> None:
    """pool[slot[i]] = rows[index[i]] (rows[i] without `index`), cast to the pool's dtype, where the slot isn't null."""
    slot = slot.long()
    if pool.device.type == "cpu":
        kept = torch.nonzero(slot > 0).squeeze(1)
        if len(kept) < len(slot):
            slot, index = slot[kept], kept if index is None else index[kept]
    if len(slot):
        values = rows if index is None else rows.index_select(0, index.long())
        pool.index_copy_(0, slot.clamp(min=0), values.to(pool.dtype))


def exported_rows(query_start: Tensor, state_out: Tensor, exports: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every state to be written besides each request's last: (request [m], number of tokens after which [m], slot [m]).

    That is `exports`, and with state_out [R, q] the state after each of the first q tokens. Tokens that a request doesn't
    have get slot 0.
    """
    start = query_start.long()
    requests = len(start) - 1
    request, offset, slot = exports.long().unbind(1)
    request = request.clamp(0, requests - 1)
    if state_out.dim() == 2:
        step = torch.arange(1, state_out.shape[1] + 1, device=start.device).expand(requests, -1)
        row = torch.arange(requests, device=start.device).unsqueeze(1).expand_as(step)
        exists = step <= (start[1:] - start[:-1]).unsqueeze(1)
        request = torch.cat([request, row.flatten()])
        offset = torch.cat([offset, step.flatten()])
        slot = torch.cat([slot, torch.where(exists, state_out.long(), 0).flatten()])
    return request, offset, slot


def append_to_log(
    log: Tensor, values: Tensor, query_start: Tensor, state_in: Tensor, state_out: Tensor, log_length: Tensor
) -> None:
    """Write `values` [T, ...] behind the valid entries of each request's ring: log[state_in, log_length + offset].

    log: [slots, ring, ...]. Requests that write their state (state_out > 0) log nothing. Entries past the ring are lost.
    """
    request, offset, real = token_requests(query_start, len(values))
    slot, entry = state_in.long()[request], log_length.long()[request] + offset
    kept = real & (slot > 0) & (state_out[request] <= 0) & (entry < log.shape[1])
    if log.device.type == "cpu":
        slot, entry, values = slot[kept], entry[kept], values[kept]
    else:
        slot, entry = torch.where(kept, slot, 0), torch.where(kept, entry, 0)
    log[slot, entry] = values.to(log.dtype)


def log_entries(log: Tensor, state_in: Tensor, log_length: Tensor) -> Tensor:
    """[slots, ring, ...] -> [R, ring, ...]: each request's entries, zeros behind the valid ones and for null slots."""
    entries = read_slots(log, state_in)
    invalid = torch.arange(log.shape[1], device=log.device) >= log_length.long().unsqueeze(1)
    return entries.masked_fill_(invalid.view(*invalid.shape, *[1] * (log.dim() - 2)), 0)
