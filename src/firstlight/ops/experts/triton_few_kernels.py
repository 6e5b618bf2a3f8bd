"""Kernels of `triton_few`. Letters: T tokens, E local experts, k choices, I intermediate, H hidden.

The shared expert, where there is one, is choice number k of every token: its weights are other tensors, its share a column
of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from firstlight.ops.linear.triton_skinny_kernels import divisor, parts_of, scaled_input
from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_earlier
from firstlight.ops.triton_support import cdiv, power_of_two
from firstlight.quant import Packed, Weight, format_of


@kernel
def gate_and_up(
    x_ptr, experts_ptr, w_ptr, scale_ptr, shared_ptr, shared_scale_ptr, hidden_ptr,
    H, x_stride_t, w_stride_e, w_stride_n, scale_stride_e, scale_stride_n, shared_stride_n, shared_scale_stride_n,
    first_expert, local_experts,
    I: tl.constexpr, SHARED_I: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_SCALE: tl.constexpr, BY_ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """hidden [T * SLOTS, max(I, SHARED_I)] = silu(gate) * up of each choice; rows of choices that aren't local stay unwritten.

    HAS_SCALE: weights have a scale a block. BY_ROW: one a row instead.
    """
    wait_for_earlier(PDL)
    i_tile, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, choice = i_row // SLOTS, i_row % SLOTS
    size = I
    if SLOTS > TOP_K:
        is_shared = choice == TOP_K
        expert = tl.load(experts_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=0).to(tl.int64) - first_expert
        local = is_shared | ((expert >= 0) & (expert < local_experts))
        w_ptr = tl.where(is_shared, shared_ptr, w_ptr + expert * w_stride_e)
        scale_ptr = tl.where(is_shared, shared_scale_ptr, scale_ptr + expert * scale_stride_e)
        w_stride_n = tl.where(is_shared, shared_stride_n, w_stride_n)
        scale_stride_n = tl.where(is_shared, shared_scale_stride_n, scale_stride_n)
        size = tl.where(is_shared, SHARED_I, I)
    else:
        expert = tl.load(experts_ptr + token * TOP_K + choice).to(tl.int64) - first_expert
        local = (expert >= 0) & (expert < local_experts)
        w_ptr += expert * w_stride_e
        scale_ptr += expert * scale_stride_e
    if local and i_tile * BLOCK_I < size:
        o_i = i_tile * BLOCK_I + tl.arange(0, BLOCK_I)
        m_i = o_i < size
        gate = tl.zeros([BLOCK_I], dtype=tl.float32)
        up = tl.zeros([BLOCK_I], dtype=tl.float32)
        x_ptr += token * x_stride_t
        p_gate_scale = scale_ptr + i_tile * BLOCK_I // SCALE_ROWS * scale_stride_n
        p_up_scale = scale_ptr + (size + i_tile * BLOCK_I) // SCALE_ROWS * scale_stride_n
        for i_k in range(0, H, BLOCK_K):
            o_k = i_k + tl.arange(0, BLOCK_K)
            m_w = m_i[:, None] & (o_k < H)[None, :]
            p_gate = w_ptr + o_i[:, None] * w_stride_n + o_k[None, :]
            b_w_gate = tl.load(p_gate, mask=m_w, other=0.0)
            b_w_up = tl.load(p_gate + size * w_stride_n, mask=m_w, other=0.0)
            b_x = scaled_input(x_ptr, p_gate_scale, i_k, H, BLOCK_K, SCALE_COLUMNS, HAS_SCALE)
            gate += tl.sum(b_w_gate.to(tl.float32) * b_x[None, :], axis=1)
            if HAS_SCALE:
                b_x = scaled_input(x_ptr, p_up_scale, i_k, H, BLOCK_K, SCALE_COLUMNS, HAS_SCALE)
            up += tl.sum(b_w_up.to(tl.float32) * b_x[None, :], axis=1)
        if BY_ROW:
            p_row_scale = scale_ptr + o_i * scale_stride_n
            gate *= tl.load(p_row_scale, mask=m_i, other=0.0).to(tl.float32)
            up *= tl.load(p_row_scale + size * scale_stride_n, mask=m_i, other=0.0).to(tl.float32)
        b_h = gate * tl.sigmoid(gate) * up
        p_hidden = hidden_ptr + i_row * max(I, SHARED_I) + o_i
        tl.store(p_hidden, b_h.to(hidden_ptr.dtype.element_ty), mask=m_i)


@kernel
def down_and_sum(
    hidden_ptr, experts_ptr, weights_ptr, w_ptr, scale_ptr, shared_ptr, shared_scale_ptr, share_ptr, y_ptr,
    H, w_stride_e, w_stride_n, shared_stride_n, scale_stride_e, scale_stride_n, shared_scale_stride_n,
    first_expert, local_experts,
    I: tl.constexpr, SHARED_I: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr, CHOICES: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_SCALE: tl.constexpr, BY_ROW: tl.constexpr,
    HAS_SHARE: tl.constexpr,
):  # fmt: skip
    """y [T, H] = sum over choices of weight * down[expert] hidden; the shared expert's weight is share [T], or 1.

    HAS_SCALE, BY_ROW: as in `gate_and_up`.
    """
    i_h, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    o_i = tl.arange(0, BLOCK_I)
    m_h = o_h < H
    b_y = tl.zeros([BLOCK_H], dtype=tl.float32)
    # All choices are one tile, so that all their weights are on the way at once.
    o_j = tl.arange(0, CHOICES)
    m_j = o_j < TOP_K
    b_expert = tl.load(experts_ptr + token * TOP_K + o_j, mask=m_j, other=-1).to(tl.int64) - first_expert
    m_j = m_j & (b_expert >= 0) & (b_expert < local_experts)
    b_weight = tl.load(weights_ptr + token * TOP_K + o_j, mask=m_j, other=0.0).to(tl.float32)
    if BY_ROW:
        p_row_scale = scale_ptr + (b_expert * scale_stride_e)[None, :] + (o_h * scale_stride_n)[:, None]
        b_row_scale = tl.load(p_row_scale, mask=m_h[:, None] & m_j[None, :], other=0.0).to(tl.float32)
    RUN: tl.constexpr = min(BLOCK_I, SCALE_COLUMNS)
    for i_i in tl.static_range(0, I, BLOCK_I):
        m_i = i_i + o_i < I
        p_w = (
            w_ptr
            + (b_expert * w_stride_e)[None, :, None]
            + (o_h * w_stride_n)[:, None, None]
            + (i_i + o_i)[None, None, :]
        )
        b_w = tl.load(p_w, mask=m_h[:, None, None] & m_j[None, :, None] & m_i[None, None, :], other=0.0)
        o_run = i_i + tl.arange(0, BLOCK_I // RUN) * RUN
        b_factor = b_weight[:, None]
        if HAS_SCALE:
            p_scale = scale_ptr + b_expert[:, None] * scale_stride_e + i_h * BLOCK_H // SCALE_ROWS * scale_stride_n
            p_scale += o_run[None, :] // SCALE_COLUMNS
            b_factor = b_factor * tl.load(p_scale, mask=m_j[:, None] & (o_run < I)[None, :], other=0.0).to(tl.float32)
        o_h_i = o_run[None, :, None] + tl.arange(0, RUN)[None, None, :]
        p_hidden = hidden_ptr + ((token * SLOTS + o_j) * max(I, SHARED_I))[:, None, None] + o_h_i
        b_h = tl.load(p_hidden, mask=m_j[:, None, None] & (o_h_i < I), other=0.0).to(tl.float32) * b_factor[:, :, None]
        b_h = b_h.reshape(CHOICES, BLOCK_I)
        b_part = tl.sum(b_w.to(tl.float32) * b_h[None, :, :], axis=2)
        if BY_ROW:
            b_part *= b_row_scale
        b_y += tl.sum(b_part, axis=1)
    if SLOTS > TOP_K:
        weight = 1.0
        if HAS_SHARE:
            weight = tl.load(share_ptr + token).to(tl.float32)
        if BY_ROW:
            weight *= tl.load(shared_scale_ptr + o_h * shared_scale_stride_n, mask=m_h, other=0.0).to(tl.float32)
        p_hidden = hidden_ptr + (token * SLOTS + TOP_K) * max(I, SHARED_I)
        p_scale = shared_scale_ptr + i_h * BLOCK_H // SCALE_ROWS * shared_scale_stride_n
        for i_i in tl.static_range(0, SHARED_I, BLOCK_I):
            m_i = i_i + o_i < SHARED_I
            p_w = shared_ptr + o_h[:, None] * shared_stride_n + (i_i + o_i)[None, :]
            b_w = tl.load(p_w, mask=m_h[:, None] & m_i[None, :], other=0.0)
            b_h = scaled_input(p_hidden, p_scale, i_i, SHARED_I, BLOCK_I, SCALE_COLUMNS, HAS_SCALE)
            b_y += weight * tl.sum(b_w.to(tl.float32) * b_h[None, :], axis=1)
    tl.store(y_ptr + token * H + o_h, b_y.to(y_ptr.dtype.element_ty), mask=m_h)


def experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Weight, down: Weight, first_expert: int,
    shared: tuple[Weight, Weight] | None = None, share: Tensor | None = None, **tuning: int,
) -> Tensor:  # fmt: skip
    """x [T, H], weights and chosen [T, k] contiguous -> [T, H].

    shared: the gate_up and down of an expert that every token goes through, share [T]: its weight, 1 if None.
    tuning: block_i, block_k, num_warps for the first kernel; block_h, down_warps for the second.
    """
    tokens, hidden_size = x.shape
    local_experts, twice, _ = gate_up.shape
    top_k, size = chosen.shape[1], twice // 2
    up_data, up_scale, up_block = parts_of(gate_up)
    down_data, down_scale, down_block = parts_of(down)
    # Without a shared expert these are placeholders, unread.
    shared_up, shared_up_scale, _ = parts_of(shared[0] if shared else gate_up)
    shared_down, shared_down_scale, _ = parts_of(shared[1] if shared else down)
    shared_size = shared[1].shape[1] if shared else 0
    slots, by_row = top_k + (shared is not None), format_of(gate_up).by_row
    row = max(size, shared_size)
    hidden = torch.empty((tokens * slots, row), dtype=x.dtype, device=x.device)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    common: dict[str, Any] = {
        "first_expert": first_expert, "local_experts": local_experts, "I": size, "SHARED_I": shared_size,
        "SLOTS": slots, "TOP_K": top_k, "HAS_SCALE": isinstance(gate_up, Packed) and not by_row, "BY_ROW": by_row,
        "H": hidden_size, "hidden_ptr": hidden, "experts_ptr": chosen,
    }  # fmt: skip
    block_i, block_h = tuning.get("block_i", 4), tuning.get("block_h", 8)
    if not by_row:
        # A tile of rows has one scale: it divides the block, and the halves gate | up start where a tile does.
        block_i = divisor(up_block[0] | size | (shared_size or size), block_i)
        block_h = divisor(down_block[0], block_h)
    block_k = min(power_of_two(hidden_size), tuning.get("block_k", 1024))
    gate_and_up[(cdiv(row, block_i), tokens * slots)](
        x, w_ptr=up_data, scale_ptr=up_scale, shared_ptr=shared_up, shared_scale_ptr=shared_up_scale,
        x_stride_t=x.stride(0), w_stride_e=up_data.stride(0), w_stride_n=up_data.stride(1),
        scale_stride_e=up_scale.stride(0), scale_stride_n=up_scale.stride(1),
        shared_stride_n=shared_up.stride(-2), shared_scale_stride_n=shared_up_scale.stride(-2),
        BLOCK_I=block_i, BLOCK_K=block_k, SCALE_ROWS=up_block[0], SCALE_COLUMNS=up_block[1],
        num_warps=tuning.get("num_warps", 2), **common, **dependent_launch(x),
    )  # fmt: skip
    down_and_sum[(cdiv(hidden_size, block_h), tokens)](
        weights_ptr=weights, w_ptr=down_data, scale_ptr=down_scale, shared_ptr=shared_down,
        shared_scale_ptr=shared_down_scale, share_ptr=x if share is None else share, y_ptr=y,
        w_stride_e=down_data.stride(0), w_stride_n=down_data.stride(1), shared_stride_n=shared_down.stride(-2),
        scale_stride_e=down_scale.stride(0), scale_stride_n=down_scale.stride(1),
        shared_scale_stride_n=shared_down_scale.stride(-2), BLOCK_H=block_h,
        CHOICES=power_of_two(top_k), HAS_SHARE=share is not None,
        BLOCK_I=min(power_of_two(row), 512), SCALE_ROWS=down_block[0], SCALE_COLUMNS=down_block[1],
        num_warps=tuning.get("down_warps", 4), **common,
    )  # fmt: skip
    return y
