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
def count_pairs(
    experts_ptr, counts_ptr, pairs, first_expert, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """counts [chunks, BINS]: pairs of each expert in each chunk. Those of experts that aren't local count in bin E."""
    i_chunk = tl.program_id(0)
    o_pair = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_expert = tl.load(experts_ptr + o_pair, mask=o_pair < pairs, other=-1).to(tl.int32) - first_expert
    local = (b_expert >= 0) & (b_expert < E) & (o_pair < pairs)
    b_counts = tl.histogram(tl.where(local, b_expert, E), BINS)
    tl.store(counts_ptr + i_chunk * BINS + tl.arange(0, BINS), b_counts)


@triton.jit
def place_pairs(
    experts_ptr, counts_ptr, order_ptr, tile_ptr, tiles_ptr, pairs, chunks, first_expert,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A program a chunk: every pair finds its row from the counts of all chunks and those before it in its own.

    order [pairs]: pair of each row. tile [bound, 3]: (expert, first row, row after the last) of each tile of BLOCK_M rows.
    tiles [1]: how many tiles there are. Pairs of experts that aren't local have no row.
    """
    i_chunk = tl.program_id(0)
    o_bin, o_at = tl.arange(0, BINS), tl.arange(0, AT_ONCE)
    b_rows = tl.zeros([BINS], dtype=tl.int32)
    b_before = tl.zeros([BINS], dtype=tl.int32)
    for i in range(0, chunks, 8):
        o_chunk = i + tl.arange(0, 8)
        p_counts = counts_ptr + o_chunk[:, None] * BINS + o_bin[None, :]
        b_counts = tl.load(p_counts, mask=(o_chunk < chunks)[:, None] & (o_bin < E)[None, :], other=0)
        b_rows += tl.sum(b_counts, axis=0)
        b_before += tl.sum(tl.where((o_chunk < i_chunk)[:, None], b_counts, 0), axis=0)
    b_first = tl.cumsum(b_rows, axis=0) - b_rows
    if i_chunk == 0:
        b_tiles = (b_rows + BLOCK_M - 1) // BLOCK_M
        b_first_tile = tl.cumsum(b_tiles, axis=0) - b_tiles
        tl.store(tiles_ptr, tl.sum(b_tiles, axis=0))
        for i in range(0, tl.max(b_tiles, axis=0)):
            p_tile = tile_ptr + (b_first_tile + i) * 3
            tl.store(p_tile, o_bin, mask=i < b_tiles)
            tl.store(p_tile + 1, b_first + i * BLOCK_M, mask=i < b_tiles)
            tl.store(p_tile + 2, b_first + b_rows, mask=i < b_tiles)
    b_next = b_first + b_before
    for i in tl.static_range(0, CHUNK, AT_ONCE):
        o_pair = i_chunk * CHUNK + i + o_at
        b_expert = tl.load(experts_ptr + o_pair, mask=o_pair < pairs, other=-1).to(tl.int32) - first_expert
        local = (b_expert >= 0) & (b_expert < E) & (o_pair < pairs)
        b_expert = tl.where(local, b_expert, E)
        b_is = (b_expert[:, None] == o_bin[None, :]).to(tl.int32)
        b_rank = tl.sum(((b_expert[:, None] == b_expert[None, :]) & (o_at[None, :] < o_at[:, None])).to(tl.int32), axis=1)
        b_row = tl.sum(b_is * b_next[None, :], axis=1) + b_rank
        tl.store(order_ptr + b_row, o_pair, mask=local)
        b_next += tl.sum(b_is, axis=0)


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


def sorted_pairs(
    chosen: Tensor, first_expert: int, local_experts: int, block_m: int, bound: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(order, tile, tiles) of chosen [T, k], as `place_pairs` says; `bound` tiles at most."""
    pairs, device = chosen.numel(), chosen.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    tile = torch.empty((bound, 3), dtype=torch.int32, device=device)
    tiles = torch.empty(1, dtype=torch.int32, device=device)
    chunk = 64 if pairs <= 1024 else 1024
    chunks = triton.cdiv(pairs, chunk)
    bins = triton.next_power_of_2(local_experts + 1)
    counts = torch.empty((chunks, bins), dtype=torch.int32, device=device)
    common = {"E": local_experts, "BINS": bins, "CHUNK": chunk}
    count_pairs[(chunks,)](chosen, counts, pairs, first_expert, **common)
    place_pairs[(chunks,)](
        chosen, counts, order, tile, tiles, pairs, chunks, first_expert, BLOCK_M=block_m, AT_ONCE=64, num_warps=8, **common
    )
    return order, tile, tiles


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
    order, tile, tiles = sorted_pairs(chosen, first_expert, local_experts, block_m, bound)
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
