"""Kernels of `triton_grouped` for experts with few rows each, where reading the weights is all the time there is.

FP8 only, with a scale a block of 128 x 128 weights or, BY_ROW, one a row. The weights are the left operand of the product:
Hopper's FP8 instructions want 64 rows there, and the few rows of an expert fit on the right, from 8 on. A program walks the whole
list of an expert, and the shared expert's, which has every token, is cut into as many programs as it has tiles. Programs of an
expert that nobody chose end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firstlight.ops.experts.triton_list_kernels import COUNT_STRIDE, pairs_of
from firstlight.ops.linear.triton_quantise import quantise_tokens
from firstlight.ops.triton_launch import kernel, wait_for_inputs


@triton.jit
def rows_to_do(count_ptr, i_row, tokens, shared_tiles, BLOCK_M: tl.constexpr, HAS_SHARED: tl.constexpr):
    """(expert, whether it is the shared one, first entry, entry after the last) of a program's row in the grid.

    The shared expert comes first: its programs have the most to do.
    """
    if HAS_SHARED:
        is_shared = i_row < shared_tiles
        expert = tl.where(is_shared, 0, i_row - shared_tiles).to(tl.int64)
        first = tl.where(is_shared, i_row * BLOCK_M, 0)
        end = tl.minimum(first + BLOCK_M, tokens)
        if i_row >= shared_tiles:
            end = tl.load(count_ptr + expert * COUNT_STRIDE)
    else:
        is_shared = i_row < 0
        expert = i_row.to(tl.int64)
        first = i_row * 0
        end = tl.load(count_ptr + expert * COUNT_STRIDE)
    return expert, is_shared, first, end


@kernel
def gate_and_up(
    x_ptr, x_scale_ptr, count_ptr, list_ptr, w_ptr, scale_ptr, shared_ptr, shared_scale_ptr, hidden_ptr,
    hidden_scale_ptr, T, H, shared_tiles, x_stride_t, x_scale_stride_t, w_stride_e, w_stride_n, scale_stride_e,
    scale_stride_n, shared_stride_n, shared_scale_stride_n,
    I: tl.constexpr, SHARED_I: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BY_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [T * SLOTS, max(I, SHARED_I)] in FP8 of silu(gate) * up, by pair, and hidden_scale, one for BLOCK_I columns.

    BLOCK_I is 128, and H, I and SHARED_I are multiples of it.
    """
    wait_for_inputs(PDL)
    ROW: tl.constexpr = max(I, SHARED_I)
    i_i, i_row = tl.program_id(0), tl.program_id(1)
    expert, is_shared, first, end = rows_to_do(count_ptr, i_row, T, shared_tiles, BLOCK_M, SLOTS > TOP_K)
    size = I
    w_ptr += expert * w_stride_e
    scale_ptr += expert * scale_stride_e
    if SLOTS > TOP_K:
        size = tl.where(is_shared, SHARED_I, I)
        w_ptr = tl.where(is_shared, shared_ptr, w_ptr)
        scale_ptr = tl.where(is_shared, shared_scale_ptr, scale_ptr)
        w_stride_n = tl.where(is_shared, shared_stride_n, w_stride_n)
        scale_stride_n = tl.where(is_shared, shared_scale_stride_n, scale_stride_n)
    if i_i * BLOCK_I < size:
        for i_m in range(first, end, BLOCK_M):
            o_m = i_m + tl.arange(0, BLOCK_M)
            m_m = o_m < end
            o_p = pairs_of(list_ptr, expert, o_m, m_m, is_shared, T, SLOTS, TOP_K).to(tl.int64)
            o_t = o_p // SLOTS
            o_i, o_k = i_i * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, 128)
            p_x = x_ptr + o_t[None, :] * x_stride_t + o_k[:, None]
            p_gate = w_ptr + o_i.to(tl.int64)[:, None] * w_stride_n + o_k[None, :]
            p_up = p_gate + size.to(tl.int64) * w_stride_n
            p_gate_scale = scale_ptr + i_i * BLOCK_I // 128 * scale_stride_n
            p_up_scale = p_gate_scale + size // 128 * scale_stride_n
            p_x_scale = x_scale_ptr + o_t * x_scale_stride_t
            b_gate = tl.zeros([BLOCK_I, BLOCK_M], dtype=tl.float32)
            b_up = tl.zeros([BLOCK_I, BLOCK_M], dtype=tl.float32)
            for i_k in range(H // 128):
                b_w_gate, b_w_up = tl.load(p_gate), tl.load(p_up)
                b_x = tl.load(p_x, mask=m_m[None, :], other=0.0)
                b_gate_scale = tl.load(p_x_scale + i_k, mask=m_m, other=0.0)
                b_up_scale = b_gate_scale
                if not BY_ROW:
                    b_gate_scale *= tl.load(p_gate_scale + i_k).to(tl.float32)
                    b_up_scale *= tl.load(p_up_scale + i_k).to(tl.float32)
                b_gate += tl.dot(b_w_gate, b_x) * b_gate_scale[None, :]
                b_up += tl.dot(b_w_up, b_x) * b_up_scale[None, :]
                p_x += 128
                p_gate += 128
                p_up += 128
            if BY_ROW:
                p_row_scale = scale_ptr + o_i * scale_stride_n
                b_gate *= tl.load(p_row_scale).to(tl.float32)[:, None]
                b_up *= tl.load(p_row_scale + size * scale_stride_n).to(tl.float32)[:, None]
            b_hidden, b_scale = quantise_tokens(b_gate * tl.sigmoid(b_gate) * b_up, hidden_ptr.dtype.element_ty)
            tl.store(hidden_scale_ptr + o_p * (ROW // 128) + i_i, b_scale, mask=m_m)
            tl.store(hidden_ptr + o_p[None, :] * ROW + o_i[:, None], b_hidden, mask=m_m[None, :])


@kernel
def down(
    hidden_ptr, hidden_scale_ptr, count_ptr, list_ptr, w_ptr, scale_ptr, shared_ptr, shared_scale_ptr, y_ptr,
    T, H, shared_tiles, w_stride_e, w_stride_n, scale_stride_e, scale_stride_n, shared_stride_n, shared_scale_stride_n,
    I: tl.constexpr, SHARED_I: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T * SLOTS, H]: each pair's product. BLOCK_N divides 128."""
    wait_for_inputs(PDL)
    ROW: tl.constexpr = max(I, SHARED_I)
    i_n, i_row = tl.program_id(0), tl.program_id(1)
    expert, is_shared, first, end = rows_to_do(count_ptr, i_row, T, shared_tiles, BLOCK_M, SLOTS > TOP_K)
    size = I
    w_ptr += expert * w_stride_e
    scale_ptr += expert * scale_stride_e
    if SLOTS > TOP_K:
        size = tl.where(is_shared, SHARED_I, I)
        w_ptr = tl.where(is_shared, shared_ptr, w_ptr)
        scale_ptr = tl.where(is_shared, shared_scale_ptr, scale_ptr)
        w_stride_n = tl.where(is_shared, shared_stride_n, w_stride_n)
        scale_stride_n = tl.where(is_shared, shared_scale_stride_n, scale_stride_n)
    for i_m in range(first, end, BLOCK_M):
        o_m = i_m + tl.arange(0, BLOCK_M)
        m_m = o_m < end
        o_p = pairs_of(list_ptr, expert, o_m, m_m, is_shared, T, SLOTS, TOP_K).to(tl.int64)
        o_n, o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, 128)
        p_hidden = hidden_ptr + o_p[None, :] * ROW + o_k[:, None]
        p_w = w_ptr + o_n.to(tl.int64)[:, None] * w_stride_n + o_k[None, :]
        p_scale = scale_ptr + i_n * BLOCK_N // 128 * scale_stride_n
        p_hidden_scale = hidden_scale_ptr + o_p * (ROW // 128)
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for i_k in range(size // 128):
            b_w = tl.load(p_w)
            b_hidden = tl.load(p_hidden, mask=m_m[None, :], other=0.0)
            b_scale = tl.load(p_hidden_scale + i_k, mask=m_m, other=0.0)
            if not BY_ROW:
                b_scale *= tl.load(p_scale + i_k).to(tl.float32)
            b_acc += tl.dot(b_w, b_hidden) * b_scale[None, :]
            p_hidden += 128
            p_w += 128
        if BY_ROW:
            b_acc *= tl.load(scale_ptr + o_n * scale_stride_n).to(tl.float32)[:, None]
        tl.store(y_ptr + o_p[None, :] * H + o_n[:, None], b_acc.to(y_ptr.dtype.element_ty), mask=m_m[None, :])
