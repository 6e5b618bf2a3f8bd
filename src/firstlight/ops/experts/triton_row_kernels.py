"""Rows in the order of their experts: where each pair's row stands, and tokens quantised to there."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firstlight.ops.experts.triton_list_kernels import Lists, pairs_of
from firstlight.ops.linear.triton_quantise import groups_of_program, quantise_columns
from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two


@kernel
def number_rows(
    list_ptr, tile_ptr, tiles_ptr, row_ptr, T, local_experts,
    SLOTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """row [T * SLOTS]: where each listed pair's row stands; tile i begins at row i * BLOCK_M."""
    wait_for_inputs(PDL)
    i_tile = tl.program_id(0)
    if i_tile < tl.load(tiles_ptr):
        expert = tl.load(tile_ptr + i_tile * 3).to(tl.int64)
        o_m = tl.load(tile_ptr + i_tile * 3 + 1) + tl.arange(0, BLOCK_M)
        m_m = o_m < tl.load(tile_ptr + i_tile * 3 + 2)
        o_pair = pairs_of(list_ptr, expert, o_m, m_m, expert == local_experts, T, SLOTS, TOP_K)
        tl.store(row_ptr + o_pair, i_tile * BLOCK_M + tl.arange(0, BLOCK_M), mask=m_m)


@kernel
def quantise_to_rows(
    x_ptr, experts_ptr, row_ptr, y_ptr, scale_ptr, T, K, x_stride_t, first_expert, local_experts,
    BLOCK_T: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [rows, K] and scale [rows, K / 128] of x [T, K]: a token's row is written once for each of its experts."""
    wait_for_inputs(PDL)
    o_t, o_group, o_k = groups_of_program(BLOCK_T, GROUPS)
    m_r = (o_t < T) & (o_group * 128 < K)
    b_x = tl.load(x_ptr + o_t[:, None] * x_stride_t + o_k, mask=m_r[:, None], other=0.0).to(tl.float32)
    b_y, b_scale = quantise_columns(b_x, y_ptr.dtype.element_ty)
    for slot in tl.static_range(SLOTS):
        m_slot = m_r
        if slot < TOP_K:
            expert = tl.load(experts_ptr + o_t * TOP_K + slot, mask=m_r, other=-1) - first_expert
            m_slot = m_r & (expert >= 0) & (expert < local_experts)
        o_row = tl.load(row_ptr + o_t * SLOTS + slot, mask=m_slot, other=0).to(tl.int64)
        tl.store(y_ptr + o_row[:, None] * K + o_k, b_y, mask=m_slot[:, None])
        tl.store(scale_ptr + o_row * (K // 128) + o_group, b_scale, mask=m_slot)


def numbered(lists: Lists, tile: Tensor, tiles: Tensor, block_m: int, top_k: int) -> Tensor:
    """row int32 [T * slots], as `number_rows` says; of pairs in no list it isn't written."""
    local_experts, tokens = lists.entries.shape
    row = torch.empty(tokens * lists.slots, dtype=torch.int32, device=tile.device)
    number_rows[(tile.shape[0],)](
        lists.entries, tile, tiles, row, tokens, local_experts,
        SLOTS=lists.slots, TOP_K=top_k, BLOCK_M=block_m, **dependent_launch(row),
    )  # fmt: skip
    return row


def quantised_to_rows(
    x: Tensor, chosen: Tensor, row: Tensor, y: Tensor, scale: Tensor, slots: int, first_expert: int, local_experts: int
) -> None:
    """Fill y [rows, H] in FP8 and scale [rows, H / 128] with the tokens x [T, H]; chosen [T, k], contiguous."""
    (tokens, columns), top_k = x.shape, chosen.shape[1]
    groups = cdiv(columns, 128)
    share = min(power_of_two(groups), 16)
    block_t = max(1, 32 // share)
    quantise_to_rows[(cdiv(tokens, block_t), cdiv(groups, share))](
        x, chosen, row, y, scale, tokens, columns, x.stride(0), first_expert, local_experts,
        BLOCK_T=block_t, GROUPS=share, SLOTS=slots, TOP_K=top_k, **dependent_launch(x),
    )  # fmt: skip
