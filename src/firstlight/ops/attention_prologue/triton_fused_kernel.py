"""The kernel of `triton_fused`. Letters: T tokens, H query heads, KV heads, D dimensions of a head, F angles of a token."""

from __future__ import annotations

import triton
import triton.language as tl

from firstlight.ops.linear.triton_quantise import saturated
from firstlight.ops.triton_launch import kernel


@triton.jit
def scaled(x, weight, rms, dtype: tl.constexpr, weight_dtype: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    """The norm's result in `dtype`, rounded where the op says."""
    y = x.to(tl.float32) * rms
    if ZERO_CENTRED:
        return (y * (1.0 + weight.to(tl.float32))).to(dtype)
    return (y.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def turned(
    x_ptr,
    weight_ptr,
    angles_ptr,
    o_x,
    o_d,
    o_angle,
    mask,
    eps,
    D: tl.constexpr,
    F: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """rope(norm(x)) for rows of one head each; the other half of each pair is read a second time, out of the cache."""
    dtype = x_ptr.dtype.element_ty
    first = o_d < F
    partner = tl.where(first, o_d + F, tl.where(o_d < 2 * F, o_d - F, o_d))
    x = tl.load(x_ptr + o_x[:, None] + o_d[None, :], mask=mask, other=0.0)
    other = tl.load(x_ptr + o_x[:, None] + partner[None, :], mask=mask, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        rms = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        weight = tl.load(weight_ptr + o_d, mask=o_d < D, other=0.0)[None, :]
        x = scaled(x, weight, rms, dtype, weight_ptr.dtype.element_ty, ZERO_CENTRED)
        weight = tl.load(weight_ptr + partner, mask=o_d < D, other=0.0)[None, :]
        other = scaled(other, weight, rms, dtype, weight_ptr.dtype.element_ty, ZERO_CENTRED)
    pairs = mask & (o_d < 2 * F)[None, :]
    o_f = tl.where(first, o_d, partner)
    cos = tl.load(angles_ptr + o_angle[:, None] + o_f[None, :], mask=pairs, other=1.0).to(tl.float32)
    sin = tl.load(angles_ptr + o_angle[:, None] + F + o_f[None, :], mask=pairs, other=0.0).to(tl.float32)
    sin = tl.where(first[None, :], -sin, sin)
    return (x.to(tl.float32) * cos + other.to(tl.float32) * sin).to(dtype)


@triton.jit
def as_stored(x, dtype: tl.constexpr):
    """x in the dtype of pages; in e4m3 as `saturated` says."""
    if dtype == tl.float8e4nv:
        return saturated(x.to(tl.float32), dtype)
    return x.to(dtype)


@kernel
def attention_prologue_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    angles_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    q_ptr,
    gate_ptr,
    eps,
    tokens,
    qkv_stride_t,
    angles_stride_t,
    k_stride_page,
    k_stride_s,
    k_stride_h,
    v_stride_page,
    v_stride_s,
    v_stride_h,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GATED: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
):
    i_h = tl.program_id(1)
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_t < tokens)[:, None] & (o_d < D)[None, :]
    o_row = o_t * qkv_stride_t
    o_angle = o_t * angles_stride_t
    Q_WIDTH: tl.constexpr = 2 * D if GATED else D
    if i_h < H:
        o_x = o_row + i_h * Q_WIDTH
        q = turned(qkv_ptr, q_norm_ptr, angles_ptr, o_x, o_d, o_angle, mask, eps, D, F, ZERO_CENTRED, HAS_Q_NORM)
        o_out = (o_t * H + i_h)[:, None] * D + o_d[None, :]
        tl.store(q_ptr + o_out, q, mask=mask)
        if GATED:
            gate = tl.load(qkv_ptr + o_x[:, None] + D + o_d[None, :], mask=mask, other=0.0)
            tl.store(gate_ptr + o_out, gate, mask=mask)
    else:
        slot = tl.load(slot_ptr + o_t, mask=o_t < tokens, other=0).to(tl.int64)
        page = (slot // PAGE)[:, None]
        offset = (slot % PAGE)[:, None]
        mask = mask & (slot >= PAGE)[:, None]
        if i_h < H + KV:
            i_kv = i_h - H
            o_x = o_row + H * Q_WIDTH + i_kv * D
            k = turned(qkv_ptr, k_norm_ptr, angles_ptr, o_x, o_d, o_angle, mask, eps, D, F, ZERO_CENTRED, HAS_K_NORM)
            p_k = k_ptr + page * k_stride_page + offset * k_stride_s + i_kv * k_stride_h + o_d[None, :]
            tl.store(p_k, as_stored(k, k_ptr.dtype.element_ty), mask=mask)
        else:
            i_kv = i_h - H - KV
            v = tl.load(qkv_ptr + o_row[:, None] + H * Q_WIDTH + (KV + i_kv) * D + o_d[None, :], mask=mask, other=0.0)
            p_v = v_ptr + page * v_stride_page + offset * v_stride_s + i_kv * v_stride_h + o_d[None, :]
            tl.store(p_v, as_stored(v, v_ptr.dtype.element_ty), mask=mask)
