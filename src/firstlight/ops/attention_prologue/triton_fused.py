"""The prologue as one kernel: a program takes a few tokens of one head of q, k or v from the projection to where it goes."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import float8_pages_unavailable, power_of_two, unavailable

LARGEST_HEAD = 1024


def when(call: Call) -> str | None:
    """Every call in 32 bits or fewer; the pages may be e4m3."""
    if reason := unavailable(call.hardware):
        return reason
    if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes in float32 from 16 or 32 bits, not from {call.dtype}"
    if call.kwargs["head_dim"] > LARGEST_HEAD:
        return f"holds heads of at most {LARGEST_HEAD} dimensions, not {call.kwargs['head_dim']}"
    return float8_pages_unavailable(call.hardware, call.args[4], call.args[5])


def run(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    angles: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool = False,
    eps: float = 1e-6,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The contract of `attention_prologue`; what null slots bring is dropped."""
    from firstlight.ops.attention_prologue.triton_fused_kernel import attention_prologue_kernel

    sizes = (heads * head_dim * (1 + gated), kv_heads * head_dim, kv_heads * head_dim)
    if qkv.shape[1] != sum(sizes):
        raise ValueError(
            f"attention_prologue: qkv has {qkv.shape[1]} columns, but q | k | v take {' + '.join(map(str, sizes))}"
        )
    if angles.shape[1] > head_dim:
        raise ValueError(f"rope: angles turn {angles.shape[1]} dimensions, but heads have {head_dim}")
    dense = (("qkv", qkv), ("angles", angles), ("k_pages", k_pages), ("v_pages", v_pages))
    for name, tensor in dense:
        if tensor.stride(-1) != 1:
            raise ValueError(f"attention_prologue: rows of {name} must be dense, but its strides are {tensor.stride()}")
    tokens = qkv.shape[0]
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    gate = torch.empty((tokens, heads * head_dim), dtype=qkv.dtype, device=qkv.device) if gated else None
    if tokens == 0:
        return q, gate
    block_tokens = 1 if tokens <= 64 else 4
    grid = (-(-tokens // block_tokens), heads + 2 * kv_heads)
    attention_prologue_kernel[grid](
        qkv,
        q_norm,
        k_norm,
        angles,
        k_pages,
        v_pages,
        slot,
        q,
        gate,
        eps,
        tokens,
        qkv.stride(0),
        angles.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        H=heads,
        KV=kv_heads,
        D=head_dim,
        F=angles.shape[1] // 2,
        PAGE=k_pages.shape[1],
        BLOCK_T=block_tokens,
        BLOCK_D=power_of_two(head_dim),
        GATED=gated,
        ZERO_CENTRED=zero_centred,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        num_warps=1 if block_tokens == 1 else 4,
    )
    return q, gate
