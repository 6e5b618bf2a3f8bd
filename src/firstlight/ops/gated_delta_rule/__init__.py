"""The gated delta rule: linear attention whose state decays, forgets what a key held and writes anew.

A request's state S is a matrix per value head that maps keys to values. A token first lets S decay, then reads what S
holds for its key, replaces a part beta of it by its own value, and last reads S with its query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.gated_delta_rule import torch_chunked, torch_decode, torch_in_place
from firstlight.ops.gated_delta_rule.log import DeltaLog, append, replay
from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.precision import wide_dtype
from firstlight.ops.slots import check_log, exported_rows, read_slots, write_slots

__all__ = ["DeltaLog", "gated_delta_rule"]


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
    log: DeltaLog | None = None,
    log_length: Tensor | None = None,
) -> Tensor:
    """For each token: S *= exp(g); u = beta * (v - S k); S += u k^T; o = S q.

    q, k: [T, HK, K], normalised, q scaled. v: [T, HV, V]. HV is a multiple of HK; key head h serves value heads
    h * HV/HK to (h + 1) * HV/HK - 1. g: [T, HV], log decay, at most 0. beta: [T, HV].
    pool: [slots, HV, V, K] float32, or bfloat16 (see below), K contiguous; written in place.
    query_start: [R + 1] int, cumulative from 0; requests without tokens come last. max_query: bound of a request's tokens.
    state_in: [R] int, slot of the state before the step; null (<= 0) is a state of zeros; several may share a slot.
    state_out: [R] int, slot for the state after the request's tokens, null writes none; it may be the same slot.
      Or [R, q]: slots for the states after each of the first q tokens.
    exports: [n, 3] int rows (request, number of tokens, slot): the state after so many tokens, null slots ignored.
    log, log_length: the state at state_in is log_length [R] tokens old (at most `ring`), and the log holds those tokens.
      Requests with state_out null append the step's tokens, which must fit (log_length + tokens <= ring), and write no
      state; the others write their state with log and step folded in, and log nothing.
    Returns o, [T, HV, V] in v.dtype, contiguous. All reads come before all writes. float32 inside (float64 if q or pool
    is), one cast. A pool of bfloat16 rounds states as they are written, and nothing sooner: outputs come from states as they
    were computed, but where a step ends changes what follows. Rows of padding tokens are unspecified. Raises ValueError for a log together with state_out [R, q].
    Tolerance of providers: 1e-5 of the largest output in float32; chunks sum in another order. States in bfloat16: 2^-8 of a
    state, a rounding; an export from inside a chunk may be rounded at the chunk's start too.
    Source: Gated Delta Networks (arXiv 2412.06464), equation 10, in the order of the Qwen3-Next and Qwen3.5 model files.
    """
    check_log("gated_delta_rule", state_out, log)
    tokens = len(v)
    dtype = wide_dtype(q.dtype, pool.dtype)
    repeat = v.shape[1] // k.shape[1]
    start = query_start.long()
    count = start[1:] - start[:-1]
    request, after, slot = exported_rows(query_start, state_out, exports)

    state = read_slots(pool, state_in).to(dtype)
    if log is not None and log_length is not None:
        state = replay(state, log, state_in, log_length)
    # One row more than tokens: requests that have run out of tokens write there.
    out = v.new_zeros((tokens + 1, *v.shape[1:]))
    updates = v.new_zeros((tokens + 1, *v.shape[1:]), dtype=dtype)
    write_slots(pool, torch.where(after <= 0, slot, 0), state, request)
    for step in range(min(max_query, tokens)):
        active = step < count
        row = torch.where(active, start[:-1] + step, 0)
        key = k[row].to(dtype).repeat_interleave(repeat, dim=1)
        query = q[row].to(dtype).repeat_interleave(repeat, dim=1)
        decayed = state * g[row].to(dtype).exp()[..., None, None]
        read = torch.einsum("rhvk,rhk->rhv", decayed, key)
        update = beta[row].to(dtype).unsqueeze(-1) * (v[row].to(dtype) - read)
        written = decayed + update.unsqueeze(-1) * key.unsqueeze(-2)
        target = torch.where(active, row, tokens)
        out[target] = torch.einsum("rhvk,rhk->rhv", written, query).to(v.dtype)
        updates[target] = update
        state = torch.where(active[:, None, None, None], written, state)
        write_slots(pool, torch.where(after == step + 1, slot, 0), state, request)
    if state_out.dim() == 1:
        write_slots(pool, state_out, state)
    if log is not None and log_length is not None:
        append(log, k, updates[:tokens], g, query_start, state_in, state_out, log_length)
    return out[:tokens]


def abstract(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
    """[T, HV, V] in v.dtype."""
    return v.new_empty(v.shape)


def cost(
    shape: Shape,
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
) -> Cost:
    """Each input once in, o once out, a state in and out for each request.

    With a log: the state and half a ring (its mean fill) in, the step's entries out. Multiplications as in the recurrence;
    the chain is a step per chunk of 64 tokens of the longest request, which no parallelism over heads shortens.
    """

    def row(x: Tensor) -> int:
        return x[0].numel() * x.element_size()

    _, heads, value_dim, key_dim = pool.shape
    read = shape.tokens * sum(row(x) for x in (q, k, v, g, beta)) + shape.requests * row(pool)
    written = shape.tokens * row(v)
    if log is None:
        written = written + shape.requests * row(pool)
    else:
        entry = [x[0, 0].numel() * x.element_size() for x in (log.k, log.u, log.g)]
        read = read + shape.requests * sum(entry) * log.k.shape[1] / 2
        written = written + shape.tokens * sum(entry)
    return Cost(
        flops={"float32": shape.tokens * heads * value_dim * key_dim * 7},
        read=read,
        written=written,
        chain=-(-max_query // 64),
    )


gated_delta_rule = Op(
    "gated_delta_rule", body, abstract=abstract, cost=cost, mutates={"pool": "state_out", "log": "state_in"}
)
gated_delta_rule.provide("torch_chunked", torch_chunked.run, workspace=torch_chunked.workspace)
gated_delta_rule.provide(
    "torch_decode", torch_decode.run, when=torch_decode.when, rank=2, workspace=torch_decode.workspace
)
gated_delta_rule.provide("torch_in_place", torch_in_place.run, when=torch_in_place.when, rank=3)
