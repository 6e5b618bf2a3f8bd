"""Kernels of `triton_grouped`. A pair is a (token, choice), numbered token * k + choice; rows are pairs sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.experts.triton_few_kernels import parts_of
from firstlight.ops.linear.triton_quantise import quantise_columns, quantised
from firstlight.quant import Packed, Weight


@triton.jit
def sort_pairs(
    experts_ptr, order_ptr, tile_ptr, tiles_ptr, pairs, first_expert,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program an expert: it counts all experts' pairs, so it knows where its own begin, and lists them in their order.

    order [pairs]: pair of each row. tile [bound, 3]: (expert, first row, row after the last) of each tile of BLOCK_M rows.
    tiles [1]: how many tiles there are. Pairs of experts that aren't local are listed nowhere.
    """
    expert = tl.program_id(0)
    o_bin, o_chunk = tl.arange(0, BINS), tl.arange(0, CHUNK)
    b_rows = tl.zeros([BINS], dtype=tl.int32)
    for i_pair in range(0, pairs, CHUNK):
        b_expert = tl.load(experts_ptr + i_pair + o_chunk, mask=i_pair + o_chunk < pairs, other=-1).to(tl.int32)
        b_expert -= first_expert
        local = (b_expert >= 0) & (b_expert < E) & (i_pair + o_chunk < pairs)
        b_rows += tl.histogram(tl.where(local, b_expert, E), BINS)
    b_rows = tl.where(o_bin < E, b_rows, 0)
    b_tiles = (b_rows + BLOCK_M - 1) // BLOCK_M
    first_row = tl.sum(tl.where(o_bin < expert, b_rows, 0), axis=0)
    rows = tl.sum(tl.where(o_bin == expert, b_rows, 0), axis=0)
    first_tile = tl.sum(tl.where(o_bin < expert, b_tiles, 0), axis=0)
    if expert == 0:
        tl.store(tiles_ptr, tl.sum(b_tiles, axis=0))
    for i_tile in range(0, (rows + BLOCK_M - 1) // BLOCK_M):
        p_tile = tile_ptr + (first_tile + i_tile) * 3
        tl.store(p_tile, expert)
        tl.store(p_tile + 1, first_row + i_tile * BLOCK_M)
        tl.store(p_tile + 2, first_row + rows)
    if rows > 0:
        seen = first_row
        for i_pair in range(0, pairs, CHUNK):
            mask = i_pair + o_chunk < pairs
            b_expert = tl.load(experts_ptr + i_pair + o_chunk, mask=mask, other=-1).to(tl.int32) - first_expert
            m_mine = mask & (b_expert == expert)
            b_mine = m_mine.to(tl.int32)
            tl.store(order_ptr + seen + tl.cumsum(b_mine, axis=0) - 1, i_pair + o_chunk, mask=m_mine)
            seen += tl.sum(b_mine, axis=0)


@triton.jit
def gate_and_up(
    x_ptr, x_scale_ptr, order_ptr, tile_ptr, tiles_ptr, w_ptr, scale_ptr, hidden_ptr, hidden_scale_ptr,
    H, I, x_stride_t, x_scale_stride_t, w_stride_e, w_stride_n, scale_stride_e, scale_stride_n,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SCALE: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """hidden [rows, I] = silu(gate) * up. A tile interleaves gate and up columns, so that a thread holds both of a pair.

    With QUANTISE a program's BLOCK_I = 128 columns are one scale group, and hidden is FP8 with hidden_scale [rows, I / 128].
    """
    i_i, i_tile = tl.program_id(0), tl.program_id(1)
    if i_tile < tl.load(tiles_ptr):
        expert = tl.load(tile_ptr + i_tile * 3).to(tl.int64)
        o_m = tl.load(tile_ptr + i_tile * 3 + 1) + tl.arange(0, BLOCK_M)
        m_m = o_m < tl.load(tile_ptr + i_tile * 3 + 2)
        o_t = (tl.load(order_ptr + o_m, mask=m_m, other=0) // TOP_K).to(tl.int64)
        o_n = tl.arange(0, 2 * BLOCK_I)
        o_i = i_i * BLOCK_I + o_n // 2
        o_k = tl.arange(0, BLOCK_K)
        m_n = o_i < I
        p_x = x_ptr + o_t[:, None] * x_stride_t + o_k[None, :]
        p_w = w_ptr + expert * w_stride_e + (o_i + o_n % 2 * I).to(tl.int64)[None, :] * w_stride_n + o_k[:, None]
        b_acc = tl.zeros([BLOCK_M, 2 * BLOCK_I], dtype=tl.float32)
        p_scale = scale_ptr + expert * scale_stride_e + (i_i * BLOCK_I + o_n % 2 * I) // 128 * scale_stride_n
        p_x_scale = x_scale_ptr + o_t * x_scale_stride_t
        for i_k in range(0, tl.cdiv(H, BLOCK_K)):
            if HAS_SCALE:
                b_x = tl.load(p_x, mask=m_m[:, None], other=0.0)
                b_w = tl.load(p_w, mask=m_n[None, :], other=0.0)
                b_x_scale = tl.load(p_x_scale + i_k * BLOCK_K // 128, mask=m_m, other=0.0)
                b_scale = tl.load(p_scale + i_k * BLOCK_K // 128, mask=m_n, other=0.0).to(tl.float32)
                b_acc += tl.dot(b_x, b_w) * b_x_scale[:, None] * b_scale[None, :]
            else:
                m_k = o_k < H - i_k * BLOCK_K
                b_x = tl.load(p_x, mask=m_m[:, None] & m_k[None, :], other=0.0)
                b_w = tl.load(p_w, mask=m_n[None, :] & m_k[:, None], other=0.0)
                b_acc = tl.dot(b_x, b_w, b_acc)
            p_x += BLOCK_K
            p_w += BLOCK_K
        b_gate, b_up = b_acc.reshape(BLOCK_M, BLOCK_I, 2).split()
        b_hidden = b_gate * tl.sigmoid(b_gate) * b_up
        o_i = i_i * BLOCK_I + tl.arange(0, BLOCK_I)
        p_hidden = hidden_ptr + o_m.to(tl.int64)[:, None] * I + o_i[None, :]
        m_hidden = m_m[:, None] & (o_i < I)[None, :]
        if QUANTISE:
            b_hidden, b_scale = quantise_columns(b_hidden, hidden_ptr.dtype.element_ty)
            tl.store(hidden_scale_ptr + o_m * (I // 128) + i_i, b_scale, mask=m_m)
        tl.store(p_hidden, b_hidden.to(hidden_ptr.dtype.element_ty), mask=m_hidden)


@triton.jit
def down(
    hidden_ptr, hidden_scale_ptr, order_ptr, tile_ptr, tiles_ptr, w_ptr, scale_ptr, y_ptr,
    H, I, w_stride_e, w_stride_n, scale_stride_e, scale_stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """y [pairs, H]: each row's product, stored at its pair. BLOCK_N divides 128."""
    i_n, i_tile = tl.program_id(0), tl.program_id(1)
    if i_tile < tl.load(tiles_ptr):
        expert = tl.load(tile_ptr + i_tile * 3).to(tl.int64)
        o_m = tl.load(tile_ptr + i_tile * 3 + 1) + tl.arange(0, BLOCK_M)
        m_m = o_m < tl.load(tile_ptr + i_tile * 3 + 2)
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        m_n = o_n < H
        p_hidden = hidden_ptr + o_m.to(tl.int64)[:, None] * I + o_k[None, :]
        p_w = w_ptr + expert * w_stride_e + o_n.to(tl.int64)[None, :] * w_stride_n + o_k[:, None]
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        p_scale = scale_ptr + expert * scale_stride_e + i_n * BLOCK_N // 128 * scale_stride_n
        p_hidden_scale = hidden_scale_ptr + o_m * (I // 128)
        for i_k in range(0, tl.cdiv(I, BLOCK_K)):
            if HAS_SCALE:
                b_hidden = tl.load(p_hidden, mask=m_m[:, None], other=0.0)
                b_w = tl.load(p_w, mask=m_n[None, :], other=0.0)
                b_hidden_scale = tl.load(p_hidden_scale + i_k * BLOCK_K // 128, mask=m_m, other=0.0)
                b_scale = tl.load(p_scale + i_k * BLOCK_K // 128).to(tl.float32)
                b_acc += tl.dot(b_hidden, b_w) * (b_hidden_scale * b_scale)[:, None]
            else:
                m_k = o_k < I - i_k * BLOCK_K
                b_hidden = tl.load(p_hidden, mask=m_m[:, None] & m_k[None, :], other=0.0)
                b_w = tl.load(p_w, mask=m_n[None, :] & m_k[:, None], other=0.0)
                b_acc = tl.dot(b_hidden, b_w, b_acc)
            p_hidden += BLOCK_K
            p_w += BLOCK_K
        o_pair = tl.load(order_ptr + o_m, mask=m_m, other=0).to(tl.int64)
        p_y = y_ptr + o_pair[:, None] * H + o_n[None, :]
        tl.store(p_y, b_acc.to(y_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def weighted_sum(
    pairs_ptr, experts_ptr, weights_ptr, y_ptr, H, first_expert, local_experts,
    TOP_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """y [T, H] = sum of a token's products by their weights, in float32 and in the order of the choices."""
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    b_acc = tl.zeros([BLOCK_H], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        i_pair = i_t * TOP_K + choice
        expert = tl.load(experts_ptr + i_pair) - first_expert
        local = (expert >= 0) & (expert < local_experts)
        weight = tl.load(weights_ptr + i_pair, mask=local, other=0.0).to(tl.float32)
        b_acc += weight * tl.load(pairs_ptr + i_pair * H + o_h, mask=m_h & local, other=0.0).to(tl.float32)
    tl.store(y_ptr + i_t * H + o_h, b_acc.to(y_ptr.dtype.element_ty), mask=m_h)


TILES: list[tuple[float, dict[str, int]]] = [
    (24, {"block_m": 16, "block_i": 128, "warps": 4, "stages": 3, "block_n": 128, "down_warps": 4, "down_stages": 3}),
    (96, {"block_m": 64, "block_i": 128, "warps": 8, "stages": 3, "block_n": 128, "down_warps": 4, "down_stages": 3}),
    (float("inf"),
     {"block_m": 128, "block_i": 64, "warps": 8, "stages": 4, "block_n": 128, "down_warps": 8, "down_stages": 3}),
]  # fmt: skip
"""Tile shapes by pairs per expert, up to the bound. block_i = 128 lets a program quantise its part of the intermediate."""


def experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Weight, down_weight: Weight, first_expert: int, **tuning: int
) -> Tensor:
    """x [T, H], weights and chosen [T, k] contiguous -> [T, H]. tuning: entries of `TILES` to replace."""
    tokens, hidden_size = x.shape
    local_experts, twice, _ = gate_up.shape
    top_k, size = chosen.shape[1], twice // 2
    pairs = tokens * top_k
    if pairs == 0:
        return torch.zeros_like(x)
    packed = isinstance(gate_up, Packed)
    tile_shape = next(shape for bound, shape in TILES if pairs <= bound * local_experts) | tuning
    block_m = tile_shape["block_m"]
    bound = min(pairs, triton.cdiv(pairs, block_m) + local_experts)
    device = x.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    tile = torch.empty((bound, 3), dtype=torch.int32, device=device)
    tiles = torch.empty(1, dtype=torch.int32, device=device)
    bins = triton.next_power_of_2(local_experts + 1)
    sort_pairs[(local_experts,)](
        chosen, order, tile, tiles, pairs, first_expert, E=local_experts, BINS=bins, BLOCK_M=block_m,
        CHUNK=min(2048, triton.next_power_of_2(pairs)), num_warps=4,
    )  # fmt: skip
    up_data, up_scale, _ = parts_of(gate_up)
    down_data, down_scale, _ = parts_of(down_weight)
    source, source_scale = quantised(x, up_data.dtype) if packed else (x, x)
    in_epilogue = packed and tile_shape["block_i"] == 128
    hidden = torch.empty((pairs, size), dtype=up_data.dtype if in_epilogue else x.dtype, device=device)
    hidden_scale = torch.empty((pairs, max(size // 128, 1)), dtype=torch.float32, device=device)
    common: dict[str, Any] = {
        "order_ptr": order, "tile_ptr": tile, "tiles_ptr": tiles, "H": hidden_size, "I": size,
        "BLOCK_M": block_m, "BLOCK_K": tile_shape.get("block_k", 128 if packed else 64), "HAS_SCALE": packed,
    }  # fmt: skip
    gate_and_up[(triton.cdiv(size, tile_shape["block_i"]), bound)](
        source, source_scale, w_ptr=up_data, scale_ptr=up_scale, hidden_ptr=hidden, hidden_scale_ptr=hidden_scale,
        x_stride_t=source.stride(0), x_scale_stride_t=source_scale.stride(0),
        w_stride_e=up_data.stride(0), w_stride_n=up_data.stride(1),
        scale_stride_e=up_scale.stride(0), scale_stride_n=up_scale.stride(1),
        TOP_K=top_k, BLOCK_I=tile_shape["block_i"], QUANTISE=in_epilogue,
        num_warps=tile_shape["warps"], num_stages=tile_shape["stages"], **common,
    )  # fmt: skip
    if packed and not in_epilogue:
        hidden, hidden_scale = quantised(hidden, up_data.dtype)
    products = torch.empty((pairs, hidden_size), dtype=x.dtype, device=device)
    down[(triton.cdiv(hidden_size, tile_shape["block_n"]), bound)](
        hidden, hidden_scale, w_ptr=down_data, scale_ptr=down_scale, y_ptr=products,
        w_stride_e=down_data.stride(0), w_stride_n=down_data.stride(1),
        scale_stride_e=down_scale.stride(0), scale_stride_n=down_scale.stride(1), BLOCK_N=tile_shape["block_n"],
        num_warps=tile_shape["down_warps"], num_stages=tile_shape["down_stages"], **common,
    )  # fmt: skip
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    block_h = min(triton.next_power_of_2(hidden_size), 1024)
    weighted_sum[(tokens, triton.cdiv(hidden_size, block_h))](
        products, chosen, weights, y, hidden_size, first_expert, local_experts, TOP_K=top_k, BLOCK_H=block_h,
    )  # fmt: skip
    return y
