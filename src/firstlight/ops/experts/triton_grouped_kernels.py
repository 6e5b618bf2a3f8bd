"""Kernels of `triton_grouped`. A pair is a (token, choice), numbered token * k + choice; rows are pairs sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.experts import triton_thin_kernels as thin
from firstlight.ops.experts.triton_sort_kernels import sorted_pairs
from firstlight.ops.linear.triton_quantise import quantised
from firstlight.ops.linear.triton_skinny_kernels import parts_of
from firstlight.ops.triton_support import read_tiles, tile_for
from firstlight.quant import Packed, Weight


@triton.jit
def gate_and_up(
    x_ptr, x_scale_ptr, order_ptr, tile_ptr, tiles_ptr, w_ptr, scale_ptr, hidden_ptr,
    H, I, x_stride_t, x_scale_stride_t, w_stride_e, w_stride_n, scale_stride_e, scale_stride_n,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """hidden [rows, I] = silu(gate) * up. A tile interleaves gate and up columns, so that a thread holds both of a pair."""
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
        b_acc = tl.zeros([BLOCK_M, BLOCK_I, 2], dtype=tl.float32)
        p_scale = scale_ptr + expert * scale_stride_e + (i_i * BLOCK_I + tl.arange(0, 2) * I) // 128 * scale_stride_n
        p_x_scale = x_scale_ptr + o_t * x_scale_stride_t
        for i_k in range(tl.cdiv(H, BLOCK_K)):
            if HAS_SCALE:
                b_x = tl.load(p_x, mask=m_m[:, None], other=0.0)
                b_w = tl.load(p_w, mask=m_n[None, :], other=0.0)
                b_x_scale = tl.load(p_x_scale + i_k * BLOCK_K // 128, mask=m_m, other=0.0)
                b_scale = b_x_scale[:, None] * tl.load(p_scale + i_k * BLOCK_K // 128).to(tl.float32)[None, :]
                b_acc += tl.dot(b_x, b_w).reshape(BLOCK_M, BLOCK_I, 2) * b_scale[:, None, :]
            else:
                m_k = o_k < H - i_k * BLOCK_K
                b_x = tl.load(p_x, mask=m_m[:, None] & m_k[None, :], other=0.0)
                b_w = tl.load(p_w, mask=m_n[None, :] & m_k[:, None], other=0.0)
                b_acc += tl.dot(b_x, b_w).reshape(BLOCK_M, BLOCK_I, 2)
            p_x += BLOCK_K
            p_w += BLOCK_K
        b_gate, b_up = b_acc.split()
        b_hidden = b_gate * tl.sigmoid(b_gate) * b_up
        o_i = i_i * BLOCK_I + tl.arange(0, BLOCK_I)
        p_hidden = hidden_ptr + o_m.to(tl.int64)[:, None] * I + o_i[None, :]
        m_hidden = m_m[:, None] & (o_i < I)[None, :]
        tl.store(p_hidden, b_hidden.to(hidden_ptr.dtype.element_ty), mask=m_hidden)


@triton.jit
def down(
    hidden_ptr, hidden_scale_ptr, order_ptr, tile_ptr, tiles_ptr, w_ptr, scale_ptr, y_ptr,
    H, I, w_stride_e, w_stride_n, scale_stride_e, scale_stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, N_TILES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """y [pairs, H]: each row's product, stored at its pair. BLOCK_N divides 128.

    A program computes N_TILES tiles of columns in one loop, so that the loads of the next are under way while one is stored.
    """
    i_band, i_tile = tl.program_id(0), tl.program_id(1)
    if i_tile < tl.load(tiles_ptr):
        expert = tl.load(tile_ptr + i_tile * 3).to(tl.int64)
        o_m = tl.load(tile_ptr + i_tile * 3 + 1) + tl.arange(0, BLOCK_M)
        m_m = o_m < tl.load(tile_ptr + i_tile * 3 + 2)
        o_pair = tl.load(order_ptr + o_m, mask=m_m, other=0).to(tl.int64)
        o_tile_n, o_k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        p_hidden = hidden_ptr + o_m.to(tl.int64)[:, None] * I + o_k[None, :]
        p_hidden_scale = hidden_scale_ptr + o_m * (I // 128)
        p_w = w_ptr + expert * w_stride_e + o_tile_n.to(tl.int64)[None, :] * w_stride_n + o_k[:, None]
        p_scale = scale_ptr + expert * scale_stride_e
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        steps = tl.cdiv(I, BLOCK_K)
        for i in range(steps * N_TILES):
            i_k = i % steps
            i_n = i_band * N_TILES + i // steps
            o_n = i_n * BLOCK_N + o_tile_n
            m_n = o_n < H
            if HAS_SCALE:
                b_hidden = tl.load(p_hidden + i_k * BLOCK_K, mask=m_m[:, None], other=0.0)
                b_w = tl.load(
                    p_w + i_n.to(tl.int64) * BLOCK_N * w_stride_n + i_k * BLOCK_K, mask=m_n[None, :], other=0.0
                )
                b_hidden_scale = tl.load(p_hidden_scale + i_k * BLOCK_K // 128, mask=m_m, other=0.0)
                p_tile_scale = p_scale + i_n * BLOCK_N // 128 * scale_stride_n + i_k * BLOCK_K // 128
                b_scale = b_hidden_scale * tl.load(p_tile_scale, mask=i_n * BLOCK_N < H, other=0.0).to(tl.float32)
                b_acc += tl.dot(b_hidden, b_w) * b_scale[:, None]
            else:
                m_k = o_k < I - i_k * BLOCK_K
                b_hidden = tl.load(p_hidden + i_k * BLOCK_K, mask=m_m[:, None] & m_k[None, :], other=0.0)
                m_w = m_n[None, :] & m_k[:, None]
                b_w = tl.load(p_w + i_n.to(tl.int64) * BLOCK_N * w_stride_n + i_k * BLOCK_K, mask=m_w, other=0.0)
                b_acc += tl.dot(b_hidden, b_w)
            if i_k == steps - 1:
                p_y = y_ptr + o_pair[:, None] * H + o_n[None, :]
                tl.store(p_y, b_acc.to(y_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])
                b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)


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


TILES = read_tiles(__file__, "triton_grouped_tiles.json")
"""Tile shapes by pairs per expert; with block_m under 64 the kernels are those of `triton_thin_kernels`."""


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
    tile_shape = tile_for(TILES if packed else TILES[-1:], pairs / local_experts) | tuning
    block_m = tile_shape["block_m"]
    bound = min(pairs, triton.cdiv(pairs, block_m) + local_experts)
    order, tile, tiles = sorted_pairs(chosen, first_expert, local_experts, block_m, bound)
    up_data, up_scale, _ = parts_of(gate_up)
    down_data, down_scale, _ = parts_of(down_weight)
    source, source_scale = quantised(x, up_data.dtype) if packed else (x, x)
    products = torch.empty((pairs, hidden_size), dtype=x.dtype, device=x.device)
    common: dict[str, Any] = {
        "order_ptr": order, "tile_ptr": tile, "tiles_ptr": tiles, "H": hidden_size, "I": size, "BLOCK_M": block_m,
    }  # fmt: skip
    up_arguments: dict[str, Any] = {
        "x_ptr": source, "x_scale_ptr": source_scale, "w_ptr": up_data, "scale_ptr": up_scale,
        "x_stride_t": source.stride(0), "x_scale_stride_t": source_scale.stride(0),
        "w_stride_e": up_data.stride(0), "w_stride_n": up_data.stride(1),
        "scale_stride_e": up_scale.stride(0), "scale_stride_n": up_scale.stride(1), "TOP_K": top_k,
        "BLOCK_I": tile_shape["block_i"], "num_warps": tile_shape["warps"], "num_stages": tile_shape["stages"], **common,
    }  # fmt: skip
    down_arguments: dict[str, Any] = {
        "w_ptr": down_data, "scale_ptr": down_scale, "y_ptr": products,
        "w_stride_e": down_data.stride(0), "w_stride_n": down_data.stride(1),
        "scale_stride_e": down_scale.stride(0), "scale_stride_n": down_scale.stride(1), "BLOCK_N": tile_shape["block_n"],
        "num_warps": tile_shape["down_warps"], "num_stages": tile_shape["down_stages"], **common,
    }  # fmt: skip
    up_grid = (triton.cdiv(size, tile_shape["block_i"]), bound)
    if block_m < 64:
        hidden = torch.empty((pairs, size), dtype=up_data.dtype, device=x.device)
        hidden_scale = torch.empty((pairs, size // 128), dtype=torch.float32, device=x.device)
        thin.gate_and_up[up_grid](hidden_ptr=hidden, hidden_scale_ptr=hidden_scale, **up_arguments)
        down_grid = (triton.cdiv(hidden_size, tile_shape["block_n"]), bound)
        thin.down[down_grid](hidden, hidden_scale, **down_arguments)
    else:
        hidden = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
        wide: dict[str, Any] = {"BLOCK_K": 128 if packed else 64, "HAS_SCALE": packed}
        gate_and_up[up_grid](hidden_ptr=hidden, **up_arguments, **wide)
        hidden, hidden_scale = quantised(hidden, up_data.dtype) if packed else (hidden, hidden)
        down_grid = (triton.cdiv(hidden_size, tile_shape["block_n"] * tile_shape["n_tiles"]), bound)
        down[down_grid](hidden, hidden_scale, N_TILES=tile_shape["n_tiles"], **down_arguments, **wide)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    block_h = min(triton.next_power_of_2(hidden_size), 1024)
    weighted_sum[(tokens, triton.cdiv(hidden_size, block_h))](
        products, chosen, weights, y, hidden_size, first_expert, local_experts, TOP_K=top_k, BLOCK_H=block_h,
    )  # fmt: skip
    return y
