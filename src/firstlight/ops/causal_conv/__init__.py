"""Causal depthwise convolution over each request's tokens, with the last few columns kept as state.

The state of a request is its *window*: the last W - 1 raw columns, so that a request can be cut into steps anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.causal_conv import torch_decode
from firstlight.ops.causal_conv.activation import activate
from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.precision import wide_dtype
from firstlight.ops.slots import (
    append_to_log,
    check_log,
    exported_rows,
    log_entries,
    read_slots,
    token_requests,
    write_slots,
)


def body(
    x: Tensor,
    weight: Tensor,
    pool: Tensor,
    query_start: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    exports: Tensor,
    *,
    max_query: int,
    activation: str = "silu",
    log: Tensor | None = None,
    log_length: Tensor | None = None,
) -> Tensor:
    """y[t, c] = silu(sum_j weight[c, j] * x[t - (W - 1) + j, c]) with columns before the step taken from the window.

    x: [T, C], requests one behind the other. weight: [C, W], the last tap meets the current token.
    pool: [slots, C, W - 1], any strides, oldest column first; written in place.
    query_start: [R + 1] int, cumulative from 0; requests without tokens come last. max_query: bound of a request's tokens.
    state_in: [R] int, slot of the window before the step; null (<= 0) is a window of zeros; several may share a slot.
    state_out: [R] int, slot for the window after the request's tokens, null writes none; it may be the same slot.
      Or [R, q]: slots for the windows after each of the first q tokens.
    exports: [n, 3] int rows (request, number of tokens, slot): the window after so many tokens, null slots ignored.
    activation: "silu" or "none".
    log: [slots, ring, C] with log_length [R]: columns since the window at state_in, which the step continues. The step's
      columns are appended to the log of requests with state_out null; the others write their window, log included.
    Returns [T, C] in x.dtype. All reads come before all writes. Products and sums in float32 (float64 if x is), one cast.
    Rows of padding tokens are unspecified. Raises ValueError for another activation, or a log with state_out [R, q].
    Source: causal_conv1d as Qwen3-Next and Qwen3.5 use it before their gated delta rule.
    """
    check_log("causal_conv", state_out, log)
    width = weight.shape[1] - 1
    requests = len(state_in)
    start = query_start.long()
    count = start[1:] - start[:-1]
    windows = read_slots(pool, state_in).transpose(1, 2)
    if log is not None and log_length is not None:
        history = torch.cat([windows, log_entries(log, state_in, log_length).to(windows.dtype)], dim=1)
        valid = torch.where(state_in > 0, log_length, 0).long()
        last = valid.unsqueeze(1) + torch.arange(width, device=x.device)
        windows = history.gather(1, last.unsqueeze(-1).expand(-1, -1, history.shape[-1]))
    # Every request's columns in one piece, its window before its tokens: a tap is then a shifted view of all of them.
    dtype = wide_dtype(x.dtype)
    columns = x.new_empty((len(x) + requests * width, x.shape[1]), dtype=dtype)

    def column(request: Tensor, offset: Tensor) -> Tensor:
        """The row of `columns` that holds a request's column; offset -1 is the window's last."""
        return start[request] + (request + 1) * width + offset

    everyone = torch.arange(requests, device=x.device)
    before = torch.arange(-width, 0, device=x.device)
    columns[column(everyone.unsqueeze(1), before)] = windows.to(dtype)
    request, offset, _ = token_requests(query_start, len(x))
    rows = column(request, offset)
    columns[rows] = x.to(dtype)
    taps = weight.to(dtype).T
    total = columns[: len(columns) - width] * taps[0]
    for tap in range(1, width + 1):
        total.addcmul_(columns[tap : len(columns) - width + tap], taps[tap])
    y = activate(total, activation)[rows - width].to(x.dtype)

    row, after, slot = exported_rows(query_start, state_out, exports)
    if state_out.dim() == 1:
        row = torch.cat([row, everyone])
        after, slot = torch.cat([after, count]), torch.cat([slot, state_out.long()])
    after = torch.minimum(after.clamp(min=0), count[row])
    write_slots(pool, slot, columns[column(row.unsqueeze(1), after.unsqueeze(1) + before)].transpose(1, 2))
    if log is not None and log_length is not None:
        append_to_log(log, x, query_start, state_in, state_out, log_length)
    return y


def abstract(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """[T, C] in x.dtype."""
    return x.new_empty(x.shape)


def cost(
    shape: Shape, x: Tensor, weight: Tensor, pool: Tensor, *args: object, log: Tensor | None = None, **kwargs: object
) -> Cost:
    """Tokens once in and out, the weight once, a window in and out for each request (with a log: in, and columns out)."""
    row = x.shape[1] * x.element_size()
    window = pool[0].numel() * pool.element_size()
    kept = shape.requests * window if log is None else shape.tokens * row
    return Cost(
        flops={"float32": shape.tokens * 2 * weight.numel()},
        read=shape.tokens * row + weight.numel() * weight.element_size() + shape.requests * window,
        written=shape.tokens * row + kept,
    )


causal_conv = Op("causal_conv", body, abstract=abstract, cost=cost, mutates={"pool": "state_out", "log": "state_in"})
causal_conv.provide("torch_decode", torch_decode.run, when=torch_decode.when, workspace=torch_decode.workspace)
