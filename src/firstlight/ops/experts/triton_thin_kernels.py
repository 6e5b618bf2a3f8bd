"""Kernels of `triton_grouped` for experts with few rows each, where reading the weights is all the time there is.

FP8 only. The weights are the left operand of the product: Hopper's FP8 instructions want 64 rows there, and the few rows
of an expert fit on the right, from 8 on. A program's 128 columns of the intermediate are one scale group, so it leaves
them quantised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firstlight.ops.linear.triton_quantise import LEAST


@triton.jit
def gate_and_up(
    x_ptr, x_scale_ptr, order_ptr, tile_ptr, tiles_ptr, w_ptr, scale_ptr, hidden_ptr, hidden_scale_ptr,
    H, I, x_stride_t, x_scale_stride_t, w_stride_e, w_stride_n, scale_stride_e, scale_stride_n,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """hidden [rows, I] FP8 and hidden_scale [rows, I / 128] of silu(gate) * up; BLOCK_I is 128, H and I multiples of it."""
    i_i, i_tile = tl.program_id(0), tl.program_id(1)
    if i_tile < tl.load(tiles_ptr):
        expert = tl.load(tile_ptr + i_tile * 3).to(tl.int64)
        o_m = tl.load(tile_ptr + i_tile * 3 + 1) + tl.arange(0, BLOCK_M)
        m_m = o_m < tl.load(tile_ptr + i_tile * 3 + 2)
        o_t = (tl.load(order_ptr + o_m, mask=m_m, other=0) // TOP_K).to(tl.int64)
        o_i, o_k = i_i * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, 128)
        p_x = x_ptr + o_t[None, :] * x_stride_t + o_k[:, None]
        p_gate = w_ptr + expert * w_stride_e + o_i.to(tl.int64)[:, None] * w_stride_n + o_k[None, :]
        p_up = p_gate + I.to(tl.int64) * w_stride_n
        p_gate_scale = scale_ptr + expert * scale_stride_e + i_i * BLOCK_I // 128 * scale_stride_n
        p_up_scale = p_gate_scale + I // 128 * scale_stride_n
        p_x_scale = x_scale_ptr + o_t * x_scale_stride_t
        b_gate = tl.zeros([BLOCK_I, BLOCK_M], dtype=tl.float32)
        b_up = tl.zeros([BLOCK_I, BLOCK_M], dtype=tl.float32)
        for i_k in range(H // 128):
            b_w_gate, b_w_up = tl.load(p_gate), tl.load(p_up)
            b_x = tl.load(p_x, mask=m_m[None, :], other=0.0)
            b_x_scale = tl.load(p_x_scale + i_k, mask=m_m, other=0.0)
            b_gate += tl.dot(b_w_gate, b_x) * (b_x_scale * tl.load(p_gate_scale + i_k).to(tl.float32))[None, :]
            b_up += tl.dot(b_w_up, b_x) * (b_x_scale * tl.load(p_up_scale + i_k).to(tl.float32))[None, :]
            p_x += 128
            p_gate += 128
            p_up += 128
        b_hidden = b_gate * tl.sigmoid(b_gate) * b_up
        LIMIT: tl.constexpr = 240.0 if hidden_ptr.dtype.element_ty == tl.float8e4b8 else 448.0
        b_scale = tl.maximum(tl.max(tl.abs(b_hidden), axis=0), LEAST) / LIMIT
        b_hidden = tl.clamp(b_hidden / b_scale[None, :], -LIMIT, LIMIT)
        tl.store(hidden_scale_ptr + o_m * (I // 128) + i_i, b_scale, mask=m_m)
        p_hidden = hidden_ptr + o_m.to(tl.int64)[None, :] * I + o_i[:, None]
        tl.store(p_hidden, b_hidden.to(hidden_ptr.dtype.element_ty), mask=m_m[None, :])


@triton.jit
def down(
    hidden_ptr, hidden_scale_ptr, order_ptr, tile_ptr, tiles_ptr, w_ptr, scale_ptr, y_ptr,
    H, I, w_stride_e, w_stride_n, scale_stride_e, scale_stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y [pairs, H]: each row's product, stored at its pair. BLOCK_N divides 128, and H and I are multiples of 128."""
    i_n, i_tile = tl.program_id(0), tl.program_id(1)
    if i_tile < tl.load(tiles_ptr):
        expert = tl.load(tile_ptr + i_tile * 3).to(tl.int64)
        o_m = tl.load(tile_ptr + i_tile * 3 + 1) + tl.arange(0, BLOCK_M)
        m_m = o_m < tl.load(tile_ptr + i_tile * 3 + 2)
        o_n, o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, 128)
        p_hidden = hidden_ptr + o_m.to(tl.int64)[None, :] * I + o_k[:, None]
        p_w = w_ptr + expert * w_stride_e + o_n.to(tl.int64)[:, None] * w_stride_n + o_k[None, :]
        p_scale = scale_ptr + expert * scale_stride_e + i_n * BLOCK_N // 128 * scale_stride_n
        p_hidden_scale = hidden_scale_ptr + o_m * (I // 128)
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for i_k in range(I // 128):
            b_w = tl.load(p_w)
            b_hidden = tl.load(p_hidden, mask=m_m[None, :], other=0.0)
            b_scale = tl.load(p_hidden_scale + i_k, mask=m_m, other=0.0) * tl.load(p_scale + i_k).to(tl.float32)
            b_acc += tl.dot(b_w, b_hidden) * b_scale[None, :]
            p_hidden += 128
            p_w += 128
        o_pair = tl.load(order_ptr + o_m, mask=m_m, other=0).to(tl.int64)
        tl.store(y_ptr + o_pair[None, :] * H + o_n[:, None], b_acc.to(y_ptr.dtype.element_ty), mask=m_m[None, :])
