"""One token a request on the CPU: each state is updated where it lies.

States are most of what a decode step touches here, and copying them out of the pool and back costs more than the update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstlight.ops.gated_delta_rule import torch_decode
from firstlight.ops.op import Call
from firstlight.ops.precision import wide_dtype
from firstlight.quant import dtype_name


def when(call: Call) -> str | None:
    """As the batched form, on a CPU, for states that are computed in the dtype that they are kept in."""
    if call.hardware.kind != "cpu":
        return "serves CPUs only"
    if call.args[5].dtype not in (torch.float32, torch.float64):
        return f"computes in the states themselves, and so in float32, not in {dtype_name(call.args[5].dtype)}"
    return torch_decode.when(call)


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
    """The contract of `gated_delta_rule` for one token (or none) a request.

    Steps with exports, or where a slot that one request writes is read by another, are left to the batched form.
    """
    dtype = wide_dtype(q.dtype, pool.dtype)
    sources = [max(slot, 0) for slot in state_in.tolist()]
    targets = [max(slot, 0) for slot in state_out.tolist()]
    readers = {slot: sources.count(slot) for slot in set(sources)}
    foreign = any(
        target and readers.get(target, 0) > (source == target) for source, target in zip(sources, targets, strict=True)
    )
    if foreign or dtype != pool.dtype or bool((exports[:, 2] > 0).any()):
        return torch_decode.run(q, k, v, g, beta, pool, query_start, state_in, state_out, exports, max_query=max_query)
    key_heads = k.shape[1]
    repeat = v.shape[1] // key_heads
    keys, queries, values = k.to(dtype), q.to(dtype), v.to(dtype)
    decay, strength = g.to(dtype).exp(), beta.to(dtype)
    both = torch.stack([keys, queries], dim=2)  # [R, HK, 2, K]
    overlap = (keys * queries).sum(-1).repeat_interleave(repeat, dim=1)
    repeated = keys.repeat_interleave(repeat, dim=1).unsqueeze(-2)
    out = torch.zeros_like(values)
    bounds = query_start.tolist()
    for r, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if target:
            state = pool[target]
            if not source:
                state.zero_()
            elif source != target:
                state.copy_(pool[source])
        else:
            state = pool[source].clone() if source else torch.zeros_like(pool[0])
        if bounds[r + 1] == bounds[r]:
            continue
        flat = state.view(key_heads, -1, state.shape[-1])
        # Rows times the transposed state: several times quicker in BLAS than the state times columns.
        held, answer = torch.bmm(both[r], flat.transpose(1, 2)).unbind(1)
        held, answer = held.reshape(values.shape[1:]), answer.reshape(values.shape[1:])
        fade = decay[r].unsqueeze(-1)
        update = strength[r].unsqueeze(-1) * (values[r] - fade * held)
        out[r] = fade * answer + update * overlap[r].unsqueeze(-1)
        state.mul_(fade.unsqueeze(-1)).addcmul_(update.unsqueeze(-1), repeated[r])
    return out.to(v.dtype)
