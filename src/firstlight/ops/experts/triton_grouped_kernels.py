"""Kernels of `triton_grouped` for experts with many rows, and the launches of both kinds.

A tile is up to BLOCK_M pairs of one expert. The shared expert, where there is one, is expert number E: its weights are other
tensors, its pairs every token's last slot.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.experts import triton_thin_kernels as thin
from firstlight.ops.experts.triton_list_kernels import Lists, listed, pairs_of, tiled
from firstlight.ops.experts.triton_sum_kernel import summed
from firstlight.ops.linear.triton_quantise import quantised, saturated, scale_of
from firstlight.ops.linear.triton_skinny_kernels import parts_of
from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, read_tiles, tile_for
from firstlight.quant import Packed, Weight, format_of


@triton.jit
def tile_of(
    tile_ptr, w_ptr, scale_ptr, shared_ptr, shared_scale_ptr, i_tile, local_experts, w_stride_e, w_stride_n,
    scale_stride_e, scale_stride_n, shared_stride_n, shared_scale_stride_n,
    I: tl.constexpr, SHARED_I: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """(expert, first entry, entry after the last, whether it is the shared one, its I, weights, scales, their row strides)."""
    expert = tl.load(tile_ptr + i_tile * 3).to(tl.int64)
    first, end = tl.load(tile_ptr + i_tile * 3 + 1), tl.load(tile_ptr + i_tile * 3 + 2)
    is_shared = expert == local_experts
    size = tl.where(is_shared, SHARED_I, I)
    w_ptr += expert * w_stride_e
    scale_ptr += expert * scale_stride_e
    if SLOTS > TOP_K:
        w_ptr = tl.where(is_shared, shared_ptr, w_ptr)
        scale_ptr = tl.where(is_shared, shared_scale_ptr, scale_ptr)
        w_stride_n = tl.where(is_shared, shared_stride_n, w_stride_n)
        scale_stride_n = tl.where(is_shared, shared_scale_stride_n, scale_stride_n)
    return expert, first, end, is_shared, size, w_ptr, scale_ptr, w_stride_n, scale_stride_n


@triton.jit
def silu_mul(b_acc, p_row_scale, BY_ROW: tl.constexpr):
    """silu(gate) * up of pairs [M, N, 2]. BY_ROW: their weights' scales are at p_row_scale [N, 2]."""
    if BY_ROW:
        b_acc *= tl.load(p_row_scale).to(tl.float32)[None, :, :]
    b_gate, b_up = b_acc.split()
    return b_gate * tl.sigmoid(b_gate) * b_up


@triton.jit
def gate_and_up_tile(
    x_ptr, x_scale_ptr, list_ptr, w_ptr, scale_ptr, hidden_ptr, hidden_scale_ptr, i_i, expert, first, end, is_shared,
    size, T, H, x_stride_t, x_scale_stride_t, w_stride_n, scale_stride_n,
    ROW: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, HAS_SCALE: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M rows; see `gate_and_up`."""
    HALVES: tl.constexpr = 2 if HAS_SCALE else 1
    o_m = first + tl.arange(0, BLOCK_M)
    m_m = o_m < end
    o_p = pairs_of(list_ptr, expert, o_m, m_m, is_shared, T, SLOTS, TOP_K).to(tl.int64)
    o_t = o_p // SLOTS
    first_i = i_i * BLOCK_I * HALVES
    o_n = tl.arange(0, 2 * BLOCK_I)
    o_i = first_i + o_n // 2
    o_k = tl.arange(0, BLOCK_K)
    p_x = x_ptr + o_t[:, None] * x_stride_t + o_k[None, :]
    p_w = w_ptr + (o_i + o_n % 2 * size).to(tl.int64)[None, :] * w_stride_n + o_k[:, None]
    p_scale = scale_ptr + (first_i + tl.arange(0, 2) * size) // 128 * scale_stride_n
    p_row_scale = first_i + tl.arange(0, BLOCK_I)[:, None] + tl.arange(0, 2)[None, :] * size
    p_row_scale = scale_ptr + p_row_scale * scale_stride_n
    p_x_scale = x_scale_ptr + o_t * x_scale_stride_t
    b_acc = tl.zeros([BLOCK_M, BLOCK_I, 2], dtype=tl.float32)
    b_first = tl.zeros([BLOCK_M, BLOCK_I], dtype=tl.float32)
    steps = tl.cdiv(H, BLOCK_K)
    for i in range(steps * HALVES):
        if HAS_SCALE:
            i_k = i % steps
            b_x = tl.load(p_x + i_k * BLOCK_K, mask=m_m[:, None], other=0.0)
            b_w = tl.load(p_w + (i // steps * BLOCK_I).to(tl.int64) * w_stride_n + i_k * BLOCK_K)
            b_scale = tl.load(p_x_scale + i_k, mask=m_m, other=0.0)[:, None]
            if not BY_ROW:
                b_scale *= tl.load(p_scale + i_k).to(tl.float32)[None, :]
            b_acc += tl.dot(b_x, b_w).reshape(BLOCK_M, BLOCK_I, 2) * b_scale[:, None, :]
            if i == steps - 1:
                b_first = silu_mul(b_acc, p_row_scale, BY_ROW)
                b_acc = tl.zeros([BLOCK_M, BLOCK_I, 2], dtype=tl.float32)
        else:
            m_k = o_k < H - i * BLOCK_K
            b_x = tl.load(p_x + i * BLOCK_K, mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(p_w + i * BLOCK_K, mask=(o_i < size)[None, :] & m_k[:, None], other=0.0)
            b_acc += tl.dot(b_x, b_w).reshape(BLOCK_M, BLOCK_I, 2)
    b_hidden = silu_mul(b_acc, p_row_scale + (HALVES - 1) * BLOCK_I * scale_stride_n, BY_ROW)
    o_i = first_i + tl.arange(0, BLOCK_I)
    p_hidden = hidden_ptr + o_p[:, None] * ROW + o_i[None, :]
    if HAS_SCALE:
        DTYPE: tl.constexpr = hidden_ptr.dtype.element_ty
        b_most = tl.maximum(tl.max(tl.abs(b_first), axis=1), tl.max(tl.abs(b_hidden), axis=1))
        b_scale = scale_of(b_most, DTYPE)
        tl.store(hidden_scale_ptr + o_p * (ROW // 128) + i_i, b_scale, mask=m_m)
        tl.store(p_hidden, saturated(b_first / b_scale[:, None], DTYPE), mask=m_m[:, None])
        tl.store(p_hidden + BLOCK_I, saturated(b_hidden / b_scale[:, None], DTYPE), mask=m_m[:, None])
    else:
        m_hidden = m_m[:, None] & (o_i < size)[None, :]
        tl.store(p_hidden, b_hidden.to(hidden_ptr.dtype.element_ty), mask=m_hidden)


@kernel
def gate_and_up(
    x_ptr, x_scale_ptr, list_ptr, tile_ptr, tiles_ptr, w_ptr, scale_ptr, shared_ptr, shared_scale_ptr, hidden_ptr,
    hidden_scale_ptr, T, H, local_experts, x_stride_t, x_scale_stride_t, w_stride_e, w_stride_n, scale_stride_e,
    scale_stride_n, shared_stride_n, shared_scale_stride_n,
    I: tl.constexpr, SHARED_I: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, HAS_SCALE: tl.constexpr, BY_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [T * SLOTS, max(I, SHARED_I)] = silu(gate) * up, by pair; with HAS_SCALE in FP8, with hidden_scale a group.

    A tile interleaves gate and up columns, so that a thread holds both of a pair. With HAS_SCALE a program computes two
    tiles of 64 columns in one loop, a group that shares a scale; otherwise one of BLOCK_I. BY_ROW: weights have a scale a row,
    which is applied to what is summed up, in place of one a block of 128 x 128.
    """
    wait_for_inputs(PDL)
    ROW: tl.constexpr = max(I, SHARED_I)
    i_i, i_tile = tl.program_id(0), tl.program_id(1)
    if i_tile < tl.load(tiles_ptr):
        expert, first, end, is_shared, size, p_w, p_scale, row_stride, scale_stride = tile_of(
            tile_ptr, w_ptr, scale_ptr, shared_ptr, shared_scale_ptr, i_tile, local_experts, w_stride_e, w_stride_n,
            scale_stride_e, scale_stride_n, shared_stride_n, shared_scale_stride_n, I, SHARED_I, SLOTS, TOP_K,
        )  # fmt: skip
        if i_i * BLOCK_I * (2 if HAS_SCALE else 1) < size:
            gate_and_up_tile(
                x_ptr, x_scale_ptr, list_ptr, p_w, p_scale, hidden_ptr, hidden_scale_ptr, i_i, expert, first,
                end, is_shared, size, T, H, x_stride_t, x_scale_stride_t, row_stride, scale_stride,
                ROW, SLOTS, TOP_K, BLOCK_M, BLOCK_I, BLOCK_K, HAS_SCALE, BY_ROW,
            )  # fmt: skip


@triton.jit
def down_tile(
    hidden_ptr, hidden_scale_ptr, list_ptr, w_ptr, scale_ptr, y_ptr, i_band, expert, first, end, is_shared, size,
    T, H, w_stride_n, scale_stride_n,
    ROW: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, N_TILES: tl.constexpr, HAS_SCALE: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M rows; see `down`."""
    o_m = first + tl.arange(0, BLOCK_M)
    m_m = o_m < end
    o_pair = pairs_of(list_ptr, expert, o_m, m_m, is_shared, T, SLOTS, TOP_K).to(tl.int64)
    o_tile_n, o_k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    p_hidden = hidden_ptr + o_pair[:, None] * ROW + o_k[None, :]
    p_hidden_scale = hidden_scale_ptr + o_pair * (ROW // 128)
    p_w = w_ptr + o_tile_n.to(tl.int64)[None, :] * w_stride_n + o_k[:, None]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    steps = tl.cdiv(size, BLOCK_K)
    for i in range(steps * N_TILES):
        i_k = i % steps
        i_n = i_band * N_TILES + i // steps
        o_n = i_n * BLOCK_N + o_tile_n
        m_n = o_n < H
        if HAS_SCALE:
            b_hidden = tl.load(p_hidden + i_k * BLOCK_K, mask=m_m[:, None], other=0.0)
            b_w = tl.load(p_w + i_n.to(tl.int64) * BLOCK_N * w_stride_n + i_k * BLOCK_K, mask=m_n[None, :], other=0.0)
            b_scale = tl.load(p_hidden_scale + i_k * BLOCK_K // 128, mask=m_m, other=0.0)
            if not BY_ROW:
                p_tile_scale = scale_ptr + i_n * BLOCK_N // 128 * scale_stride_n + i_k * BLOCK_K // 128
                b_scale *= tl.load(p_tile_scale, mask=i_n * BLOCK_N < H, other=0.0).to(tl.float32)
            b_acc += tl.dot(b_hidden, b_w) * b_scale[:, None]
        else:
            m_k = o_k < size - i_k * BLOCK_K
            b_hidden = tl.load(p_hidden + i_k * BLOCK_K, mask=m_m[:, None] & m_k[None, :], other=0.0)
            m_w = m_n[None, :] & m_k[:, None]
            b_w = tl.load(p_w + i_n.to(tl.int64) * BLOCK_N * w_stride_n + i_k * BLOCK_K, mask=m_w, other=0.0)
            b_acc += tl.dot(b_hidden, b_w)
        if i_k == steps - 1:
            if BY_ROW:
                b_acc *= tl.load(scale_ptr + o_n * scale_stride_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
            p_y = y_ptr + o_pair[:, None] * H + o_n[None, :]
            tl.store(p_y, b_acc.to(y_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])
            b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)


@kernel
def down(
    hidden_ptr, hidden_scale_ptr, list_ptr, tile_ptr, tiles_ptr, w_ptr, scale_ptr, shared_ptr, shared_scale_ptr, y_ptr,
    T, H, local_experts, w_stride_e, w_stride_n, scale_stride_e, scale_stride_n, shared_stride_n, shared_scale_stride_n,
    I: tl.constexpr, SHARED_I: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, N_TILES: tl.constexpr,
    HAS_SCALE: tl.constexpr, BY_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T * SLOTS, H]: each pair's product. BLOCK_N divides 128. HAS_SCALE, BY_ROW: as in `gate_and_up`.

    A program computes N_TILES tiles of columns in one loop, so that the loads of the next are under way while one is stored.
    """
    wait_for_inputs(PDL)
    ROW: tl.constexpr = max(I, SHARED_I)
    i_band, i_tile = tl.program_id(0), tl.program_id(1)
    if i_tile < tl.load(tiles_ptr):
        expert, first, end, is_shared, size, p_w, p_scale, row_stride, scale_stride = tile_of(
            tile_ptr, w_ptr, scale_ptr, shared_ptr, shared_scale_ptr, i_tile, local_experts, w_stride_e, w_stride_n,
            scale_stride_e, scale_stride_n, shared_stride_n, shared_scale_stride_n, I, SHARED_I, SLOTS, TOP_K,
        )  # fmt: skip
        down_tile(
            hidden_ptr, hidden_scale_ptr, list_ptr, p_w, p_scale, y_ptr, i_band, expert, first, end, is_shared,
            size, T, H, row_stride, scale_stride,
            ROW, SLOTS, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, N_TILES, HAS_SCALE, BY_ROW,
        )  # fmt: skip


TILES = read_tiles(__file__, "triton_grouped_tiles.json")
"""Tile shapes by pairs per expert; rows without `n_tiles` are for `triton_thin_kernels`."""


def tile_shape(gate_up: Weight, pairs: int, tuning: dict[str, int]) -> dict[str, Any]:
    """The row of `TILES` for so many pairs, with `tuning` in place of its entries."""
    packed = isinstance(gate_up, Packed)
    return tile_for(TILES if packed else TILES[-1:], pairs / gate_up.shape[0]) | tuning


def experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Weight, down_weight: Weight, first_expert: int, **tuning: int
) -> Tensor:
    """x [T, H], weights and chosen [T, k] contiguous -> [T, H]. tuning: entries of `TILES` to replace."""
    if chosen.numel() == 0:
        return torch.zeros_like(x)
    shape = tile_shape(gate_up, chosen.numel(), tuning)
    lists = listed(chosen, first_expert, gate_up.shape[0])
    source = quantised(x, gate_up.parts["data"].dtype) if isinstance(gate_up, Packed) else (x, x)
    products = multiplied(source, lists, shape, gate_up, down_weight, x.dtype, chosen.shape[1])
    return summed(products, weights, chosen, first_expert, gate_up.shape[0], None)


def multiplied(
    source: tuple[Tensor, Tensor], lists: Lists, shape: dict[str, Any], gate_up: Weight, down_weight: Weight,
    dtype: torch.dtype, top_k: int, shared: tuple[Weight, Weight] | None = None,
) -> Tensor:  # fmt: skip
    """Products [T * slots, H] of every listed pair, in `dtype`; those of pairs in no list aren't written.

    source: (x [T, H] in FP8, scale [T, H / 128]), or x twice for plain weights.
    shared: gate_up and down of the expert of every token's last slot.
    """
    x, x_scale = source
    tokens, hidden_size = x.shape
    local_experts, twice, _ = gate_up.shape
    size, slots, packed, device = twice // 2, lists.slots, isinstance(gate_up, Packed), x.device
    up_data, up_scale, _ = parts_of(gate_up)
    down_data, down_scale, _ = parts_of(down_weight)
    # Without a shared expert these are placeholders, unread.
    shared_up, shared_up_scale, _ = parts_of(shared[0] if shared else gate_up)
    shared_down, shared_down_scale, _ = parts_of(shared[1] if shared else down_weight)
    shared_size = shared[1].shape[1] if shared else 0
    row, block_m = max(size, shared_size), shape["block_m"]
    products = torch.empty((tokens * slots, hidden_size), dtype=dtype, device=device)
    hidden = torch.empty((tokens * slots, row), dtype=up_data.dtype if packed else dtype, device=device)
    hidden_scale = torch.empty((tokens * slots, row // 128 if packed else 0), dtype=torch.float32, device=device)
    common: dict[str, Any] = {
        "hidden_ptr": hidden, "hidden_scale_ptr": hidden_scale, "list_ptr": lists.entries, "T": tokens,
        "H": hidden_size, "I": size, "SHARED_I": shared_size, "SLOTS": slots, "TOP_K": top_k, "BLOCK_M": block_m,
        "BY_ROW": format_of(gate_up).by_row, **dependent_launch(x),
    }  # fmt: skip
    up_arguments: dict[str, Any] = {
        "x_ptr": x, "x_scale_ptr": x_scale, "w_ptr": up_data, "scale_ptr": up_scale, "shared_ptr": shared_up,
        "shared_scale_ptr": shared_up_scale, "x_stride_t": x.stride(0), "x_scale_stride_t": x_scale.stride(0),
        "w_stride_e": up_data.stride(0), "w_stride_n": up_data.stride(1),
        "scale_stride_e": up_scale.stride(0), "scale_stride_n": up_scale.stride(1),
        "shared_stride_n": shared_up.stride(-2), "shared_scale_stride_n": shared_up_scale.stride(-2),
        "BLOCK_I": shape["block_i"], "num_warps": shape["warps"], "num_stages": shape["stages"], **common,
    }  # fmt: skip
    down_arguments: dict[str, Any] = {
        "w_ptr": down_data, "scale_ptr": down_scale, "shared_ptr": shared_down, "shared_scale_ptr": shared_down_scale,
        "y_ptr": products, "w_stride_e": down_data.stride(0), "w_stride_n": down_data.stride(1),
        "scale_stride_e": down_scale.stride(0), "scale_stride_n": down_scale.stride(1),
        "shared_stride_n": shared_down.stride(-2), "shared_scale_stride_n": shared_down_scale.stride(-2),
        "BLOCK_N": shape["block_n"], "num_warps": shape["down_warps"], "num_stages": shape["down_stages"], **common,
    }  # fmt: skip
    shared_tiles = cdiv(tokens, block_m) if shared else 0
    if "n_tiles" not in shape:
        counts: dict[str, Any] = {"count_ptr": lists.count, "shared_tiles": shared_tiles}
        rows = shared_tiles + local_experts
        thin.gate_and_up[(cdiv(row, shape["block_i"]), rows)](**up_arguments, **counts)
        thin.down[(cdiv(hidden_size, shape["block_n"]), rows)](**down_arguments, **counts)
    else:
        pairs = tokens * top_k
        bound = min(pairs, cdiv(pairs, block_m) + local_experts) + shared_tiles
        tile, tiles = tiled(lists, block_m, bound, shared is not None)
        wide: dict[str, Any] = {
            "tile_ptr": tile, "tiles_ptr": tiles, "local_experts": local_experts, "BLOCK_K": 128 if packed else 64,
            "HAS_SCALE": packed,
        }  # fmt: skip
        columns = shape["block_i"] * (2 if packed else 1)
        gate_and_up[(cdiv(row, columns), bound)](**up_arguments, **wide)
        down[(cdiv(hidden_size, shape["block_n"] * shape["n_tiles"]), bound)](
            **down_arguments, N_TILES=shape["n_tiles"], **wide
        )
    return products
