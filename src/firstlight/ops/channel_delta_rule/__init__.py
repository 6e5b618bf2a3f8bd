"""The delta rule with a decay for each channel of the key: the recurrence of Kimi Delta Attention."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.precision import wide_dtype
from firstlight.ops.slots import exported_rows, read_slots, write_slots


def body(
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
) -> Tensor:
    """For each token: S *= exp(g) along the key; u = beta * (v - S k); S += u k^T; o = S q.

    q, k: [T, H, K], normalised, q scaled. v: [T, H, V]. g: [T, H, K], log decay, at most 0. beta: [T, H].
    pool: [slots, H, V, K] float32 or bfloat16, written in place; query_start, state_in, state_out, exports, max_query: as in
    `gated_delta_rule`. Returns o, [T, H, V] in v.dtype. All reads come before all writes. float32 inside (float64 if q or
    pool is), one cast. Rows of padding tokens are unspecified.
    Tolerance of providers: 1e-5 of the largest output in float32; chunks sum in another order.
    Source: Kimi Linear (arXiv 2510.26692), in the order of its model file.
    """
    tokens, dtype = len(v), wide_dtype(q.dtype, pool.dtype)
    start = query_start.long()
    count = start[1:] - start[:-1]
    request, after, slot = exported_rows(query_start, state_out, exports)
    state = read_slots(pool, state_in).to(dtype)
    out = v.new_zeros((tokens + 1, *v.shape[1:]))  # requests that have run out of tokens write to the last row
    write_slots(pool, torch.where(after <= 0, slot, 0), state, request)
    for step in range(min(max_query, tokens)):
        active = step < count
        row = torch.where(active, start[:-1] + step, 0)
        key, query = k[row].to(dtype), q[row].to(dtype)
        decayed = state * g[row].to(dtype).exp().unsqueeze(-2)
        read = torch.einsum("rhvk,rhk->rhv", decayed, key)
        update = beta[row].to(dtype).unsqueeze(-1) * (v[row].to(dtype) - read)
        written = decayed + update.unsqueeze(-1) * key.unsqueeze(-2)
        out[torch.where(active, row, tokens)] = torch.einsum("rhvk,rhk->rhv", written, query).to(v.dtype)
        state = torch.where(active[:, None, None, None], written, state)
        write_slots(pool, torch.where(after == step + 1, slot, 0), state, request)
    if state_out.dim() == 1:
        write_slots(pool, state_out, state)
    return out[:tokens]


def abstract(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
    """[T, H, V] in v.dtype."""
    return v.new_empty(v.shape)


def cost(
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    *args: object,
    max_query: int,
    **kwargs: object,
) -> Cost:
    """Each input once in, o once out, a state in and out for each request; a chain as in `gated_delta_rule`."""
    _, heads, value_dim, key_dim = pool.shape
    state = shape.requests * pool[0].numel() * pool.element_size()
    row = sum(x[0].numel() * x.element_size() for x in (q, k, v, g, beta))
    return Cost(
        flops={"float32": shape.tokens * heads * value_dim * key_dim * 7},
        read=shape.tokens * row + state,
        written=shape.tokens * v[0].numel() * v.element_size() + state,
        chain=-(-max_query // 64),
    )


channel_delta_rule = Op("channel_delta_rule", body, abstract=abstract, cost=cost, mutates={"pool": "state_out"})
