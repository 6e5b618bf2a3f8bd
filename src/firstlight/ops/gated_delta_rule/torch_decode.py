"""One token a request: the state is read once for key and query together, then updated.

S' = exp(g) S + u k^T, and so S' q = exp(g) (S q) + u (k . q): key and query both meet the state before the update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.precision import wide_dtype
from firstlight.ops.slots import read_slots, write_slots


def when(call: Call) -> str | None:
    """Decode steps that keep plain states."""
    v, state_in, state_out = call.args[2], call.args[7], call.args[8]
    if call.kwargs["max_query"] != 1 or len(v) != len(state_in):
        return "serves steps with one token a request"
    if call.kwargs.get("log") is not None or state_out.dim() != 1:
        return "writes the state after the step only"
    return None


def workspace(call: Call) -> int:
    """The states of all requests, and what a token brings, widened, and the states as they are kept, if that is narrower: bytes."""
    q, pool, requests = call.args[0], call.args[5], len(call.args[7])
    _, heads, value_dim, key_dim = pool.shape
    row = heads * (value_dim * 10 + key_dim * 2) + q.shape[1] * key_dim * 8
    narrow = requests * heads * value_dim * key_dim * pool.element_size() if pool.element_size() < 4 else 0
    return requests * 4 * (heads * value_dim * key_dim + row) + narrow


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
    **_: Any,
) -> Tensor:
    """The contract of `gated_delta_rule` for one token (or none) a request."""
    dtype = wide_dtype(q.dtype, pool.dtype)
    key_heads = k.shape[1]
    state = read_slots(pool, state_in).to(dtype)
    if len(exports):
        request, offset, slot = exports.long().unbind(1)
        request = request.clamp(0, len(v) - 1)
        write_slots(pool, torch.where(offset > 0, 0, slot), state, request)
    has_token = (query_start[1:] > query_start[:-1]).unsqueeze(1)
    decay = torch.where(has_token, g.to(dtype).exp(), 1).unsqueeze(-1)  # [R, HV, 1]
    key = torch.where(has_token.unsqueeze(-1), k.to(dtype), 0)
    query = q.to(dtype)
    both = torch.stack([key, query], dim=2)  # [R, HK, 2, K]
    read = both @ state.view(len(state), key_heads, -1, state.shape[-1]).transpose(-1, -2)  # [R, HK, 2, r * V]
    held, answer = (part.reshape(v.shape) for part in read.unbind(2))
    update = beta.to(dtype).unsqueeze(-1) * (v.to(dtype) - decay * held)
    update = torch.where(has_token.unsqueeze(-1), update, 0)
    repeat = v.shape[1] // key_heads
    overlap = (key * query).sum(-1, keepdim=True).repeat_interleave(repeat, dim=1)
    state.mul_(decay.unsqueeze(-1)).addcmul_(update.unsqueeze(-1), key.repeat_interleave(repeat, dim=1).unsqueeze(-2))
    if len(exports):
        write_slots(pool, torch.where(offset > 0, slot, 0), state, request)
    write_slots(pool, state_out, state)
    return (decay * answer + update * overlap).to(v.dtype)
