"""The chunked form: up to 64 tokens at a time as matrix products, then one update of the state.

With G the sum of log decays from the chunk's start, the updates u of a chunk depend on each other through a triangular
system: u_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S k_i), S being the state before the
chunk. Once it is solved, outputs and states after any token of the chunk are sums over its updates:
o_i = exp(G_i) S q_i + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) u_j, and the state after n tokens is
exp(G_n) S + sum_{j<=n} exp(G_n - G_j) u_j k_j^T. So exports cost one product each, wherever they fall.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.gated_delta_rule.log import DeltaLog, append, replay
from firstlight.ops.op import Call
from firstlight.ops.precision import wide_dtype
from firstlight.ops.slots import check_log, exported_rows, read_slots, write_slots

CHUNK = 64


def workspace(call: Call) -> int:
    """States of all requests, before and after a chunk, and a chunk of all of them, widened, and states as they are kept: bytes."""
    k, pool, requests = call.args[1], call.args[5], len(call.args[7])
    _, heads, value_dim, key_dim = pool.shape
    chunk = min(CHUNK, call.kwargs["max_query"], len(k))
    tokens = chunk * (k.shape[1] * (6 * key_dim + 3 * chunk) + heads * (8 * value_dim + 5 * chunk + 16))
    out = call.args[2].nbytes + 64 * len(k)
    narrow = requests * heads * value_dim * key_dim * pool.element_size() if pool.element_size() < 4 else 0
    return requests * 4 * (4 * heads * value_dim * key_dim + tokens) + 2 * out + narrow


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    query_start: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    exports: Tensor,
    *,
    max_query: int,
    log: DeltaLog | None = None,
    log_length: Tensor | None = None,
) -> Tensor:
    """The contract of `gated_delta_rule`."""
    check_log("gated_delta_rule", state_out, log)
    tokens = len(v)
    longest = min(max_query, tokens)
    chunk = max(1, min(CHUNK, longest))
    dtype = wide_dtype(q.dtype, pool.dtype)
    start = query_start.long()
    count = start[1:] - start[:-1]
    exported, after, slot = exported_rows(query_start, state_out, exports)

    state = read_slots(pool, state_in).to(dtype)
    if log is not None and log_length is not None:
        state = replay(state, log, state_in, log_length)
    # One row more than tokens: positions past a request's end write there.
    out = v.new_zeros((tokens + 1, *v.shape[1:]))
    updates = v.new_zeros((tokens + 1, *v.shape[1:]), dtype=dtype) if log is not None else None
    write_slots(pool, torch.where(after <= 0, slot, 0), state, exported)
    everyone = torch.arange(len(state_in), device=v.device)
    for first in range(0, longest, chunk):
        # On the CPU requests that have ended are left out; a device takes all of them, so that launches don't depend on data.
        rows = torch.nonzero(count > first).squeeze(1) if v.device.type == "cpu" else everyone
        position = first + torch.arange(chunk, device=v.device)
        real = position < count[rows].unsqueeze(1)
        token = torch.where(real, start[rows].unsqueeze(1) + position, 0)
        keys, queries, values, decay, strength = (
            x[token].to(dtype).masked_fill_(~real.view(*real.shape, *[1] * (x.dim() - 1)), 0)
            for x in (k, q, v, g, beta)
        )
        part = Chunk(queries, keys, values, decay, strength, state if len(rows) == len(state) else state[rows])
        target = torch.where(real, token, tokens)
        out[target] = part.outputs().to(v.dtype)
        if updates is not None:
            updates[target] = part.updates.permute(0, 3, 1, 2, 4).flatten(2, 3)

        if len(slot):
            place = torch.zeros_like(everyone)
            place[rows] = torch.arange(len(rows), device=v.device)
            inside = (after > first) & (after <= first + chunk) & (after <= count[exported])
            kept = (
                torch.nonzero(inside & (slot > 0)).squeeze(1)
                if v.device.type == "cpu"
                else torch.arange(len(slot), device=v.device)
            )
            if len(kept):
                states = part.state_after((after[kept] - first).clamp(0, chunk), place[exported[kept]])
                write_slots(pool, torch.where(inside, slot, 0)[kept], states)
        after_chunk = part.state_after(torch.full_like(rows, chunk), torch.arange(len(rows), device=v.device))
        if len(rows) == len(state):
            state = after_chunk
        else:
            state[rows] = after_chunk
    if state_out.dim() == 1:
        write_slots(pool, state_out, state)
    if log is not None and log_length is not None and updates is not None:
        append(log, k, updates[:tokens], g, query_start, state_in, state_out, log_length)
    return out[:tokens]


class Chunk:
    """The tokens of n requests, c each, with the states before them.

    queries, keys: [n, c, HK, K]. values: [n, c, HV, V]. decay (log), strength: [n, c, HV]. state: [n, HV, V, K]. Tokens past
    a request's end are zeros: they write nothing and let nothing decay.
    Heads are held as [HK, r], r value heads to a key head, so that keys are never repeated.
    """

    def __init__(
        self, queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, strength: Tensor, state: Tensor
    ) -> None:
        c, key_heads = keys.shape[1:3]
        self.heads = (key_heads, values.shape[2] // key_heads)
        self.queries, self.keys = queries.transpose(1, 2), keys.transpose(1, 2)  # [n, HK, c, K]
        self.state = state.unflatten(1, self.heads)  # [n, HK, r, V, K]
        self.total = decay.cumsum(1).unflatten(2, self.heads).permute(0, 2, 3, 1)  # G: [n, HK, r, c]
        strength = strength.unflatten(2, self.heads).permute(0, 2, 3, 1)
        values = values.unflatten(2, self.heads).permute(0, 2, 3, 1, 4)  # [n, HK, r, c, V]
        later = torch.ones(c, c, dtype=torch.bool, device=keys.device).triu(1)
        # Masked before exp: differences in the other direction are positive and may overflow.
        between = self.total.unsqueeze(-1) - self.total.unsqueeze(-2)
        self.between = between.masked_fill_(later, float("-inf")).exp_()  # [n, HK, r, c, c]
        overlap = (self.keys @ self.keys.transpose(-1, -2)).unsqueeze(2)
        known = self.read(self.keys) * self.total.exp().unsqueeze(-1)
        self.updates = torch.linalg.solve_triangular(
            overlap * self.between * strength.unsqueeze(-1),
            (values - known) * strength.unsqueeze(-1),
            upper=False,
            unitriangular=True,
        )  # [n, HK, r, c, V]

    def read(self, rows: Tensor) -> Tensor:
        """What the state before the chunk holds for keys or queries [n, HK, c, K]: [n, HK, r, c, V]."""
        flat = rows @ self.state.flatten(2, 3).transpose(-1, -2)
        return flat.unflatten(-1, (self.heads[1], -1)).transpose(2, 3)

    def outputs(self) -> Tensor:
        """[n, c, HV, V]."""
        scores = (self.queries @ self.keys.transpose(-1, -2)).unsqueeze(2) * self.between
        result = self.read(self.queries) * self.total.exp().unsqueeze(-1) + scores @ self.updates
        return result.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def state_after(self, count: Tensor, request: Tensor) -> Tensor:
        """States [m, HV, V, K] after `count` [m] (1 to c) tokens of the requests at `request` [m] in this chunk."""
        total = self.total[request]
        reached = total.gather(-1, (count - 1).clamp(min=0).view(-1, 1, 1, 1).expand(-1, *self.heads, 1))
        past = torch.arange(total.shape[-1], device=count.device) >= count.view(-1, 1, 1, 1)
        weight = (reached - total).masked_fill(past, float("-inf")).exp()
        added = (self.updates[request] * weight.unsqueeze(-1)).transpose(-1, -2).flatten(2, 3) @ self.keys[request]
        state = self.state[request] * reached.unsqueeze(-1).exp()
        return (state + added.view_as(state)).flatten(1, 2)
