"""What comes between the qkv projection and attention: split, norm of q and k, rope, and the write to the cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from firstlight.ops.attention_prologue import triton_fused
from firstlight.ops.op import Op
from firstlight.ops.rms_norm import rms_norm
from firstlight.ops.rope import rope
from firstlight.ops.write_kv import write_kv


def body(
    parts: Any,
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
    """q, k, v, gate = split(qkv); q, k = rope(norm(q)), rope(norm(k)); k, v -> pages.

    qkv [T, N], N = heads D (1 + gated) + 2 kv_heads D, rows q | k | v; gated: the q part is [q D | gate D] for each head.
    q_norm, k_norm [D], or None: no norm; they, eps and zero_centred are those of `rms_norm` over a head's D dimensions.
    angles [T, 2 F]: see `rope`. k_pages, v_pages [P, S, kv_heads, D] are written in place at slot [T], in their own dtype: see `write_kv`.
    Returns q [T, heads, D] and gate [T, heads D] (not normed, not turned; None unless gated), in qkv.dtype.
    Raises ValueError if N isn't what the sizes say. Tolerance: that of rms_norm followed by rope.
    """
    sizes = (heads * head_dim * (1 + gated), kv_heads * head_dim, kv_heads * head_dim)
    if qkv.shape[1] != sum(sizes):
        raise ValueError(
            f"attention_prologue: qkv has {qkv.shape[1]} columns, but q | k | v take {' + '.join(map(str, sizes))}"
        )
    tokens = qkv.shape[0]
    q, k, v = qkv.split(sizes, dim=1)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in (q, k, v))
    gate = None
    if gated:
        q, gate = q.unflatten(1, (heads, 2)).unbind(dim=2)
        gate = gate.reshape(tokens, heads * head_dim)
    if q_norm is not None:
        q = parts.rms_norm(q, q_norm, eps=eps, zero_centred=zero_centred)
    if k_norm is not None:
        k = parts.rms_norm(k, k_norm, eps=eps, zero_centred=zero_centred)
    parts.write_kv(parts.rope(k, angles), v, k_pages, v_pages, slot)
    return parts.rope(q, angles), gate


def abstract(
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
    q = qkv.new_empty((qkv.shape[0], heads, head_dim))
    return q, qkv.new_empty((qkv.shape[0], heads * head_dim)) if gated else None


attention_prologue = Op(
    "attention_prologue",
    body,
    abstract=abstract,
    parts=(rms_norm, rope, write_kv),
    mutates={"k_pages": "slot", "v_pages": "slot"},
)
attention_prologue.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=5)
