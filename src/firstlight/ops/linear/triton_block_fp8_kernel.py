"""Kernels of `triton_block_fp8`, and of `triton_row_fp8`, which scales what is summed up."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from firstlight.ops.linear.triton_quantise import quantised, quantised_rows
from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, read_tiles, register_limit, tile_for
from firstlight.quant import Packed, Weight


@kernel
def multiply(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, T, N, K, x_scale_stride_t, x_scale_stride_k, w_stride_n, scale_stride_n,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, TILES_TOGETHER: tl.constexpr, HAS_BIAS: tl.constexpr, BY_ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_T x BLOCK_N of y, BLOCK_N dividing 128. BY_ROW: a scale a token and one a row of w, not one a block of 128.

    TILES_TOGETHER runs of tokens are taken together, so that they share a column's weights in L2.
    """
    wait_for_inputs(PDL)
    i_program = tl.program_id(0)
    tiles_t, tiles_n = tl.cdiv(T, BLOCK_T), tl.cdiv(N, BLOCK_N)
    band = i_program // (TILES_TOGETHER * tiles_n)
    band_size = min(tiles_t - band * TILES_TOGETHER, TILES_TOGETHER)
    inside = i_program % (TILES_TOGETHER * tiles_n)
    i_t, i_n = band * TILES_TOGETHER + inside % band_size, inside // band_size
    o_t = i_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_n = i_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, 128)
    m_t, m_n = o_t < T, o_n < N
    p_x = x_ptr + o_t[:, None] * K + o_k[None, :]
    p_w = w_ptr + o_n[None, :] * w_stride_n + o_k[:, None]
    p_x_scale = x_scale_ptr + o_t * x_scale_stride_t
    p_scale = scale_ptr + i_n * BLOCK_N // 128 * scale_stride_n
    b_acc = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for i_k in range(K // 128):
        b_x = tl.load(p_x, mask=m_t[:, None], other=0.0)
        b_w = tl.load(p_w, mask=m_n[None, :], other=0.0)
        b_part = tl.dot(b_x, b_w)
        if not BY_ROW:
            b_x_scale = tl.load(p_x_scale + i_k * x_scale_stride_k, mask=m_t, other=0.0)
            b_part *= (b_x_scale * tl.load(p_scale + i_k).to(tl.float32))[:, None]
        b_acc += b_part
        p_x += 128
        p_w += 128
    if BY_ROW:
        b_w_scale = tl.load(scale_ptr + o_n * scale_stride_n, mask=m_n, other=0.0).to(tl.float32)
        b_acc *= tl.load(p_x_scale, mask=m_t, other=0.0)[:, None] * b_w_scale[None, :]
    if HAS_BIAS:
        b_acc += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y_ptr + o_t[:, None] * N + o_n[None, :], b_acc.to(y_ptr.dtype.element_ty), mask=m_t[:, None] & m_n[None, :]
    )


@kernel
def multiply_thin(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, T, N, K, x_scale_stride_t, x_scale_stride_k, w_stride_n, scale_stride_n,
    part_columns, y_stride_part,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N columns of y for BLOCK_T tokens, over a part of K; BLOCK_N divides 128. BY_ROW: as in `multiply`.

    The weights are the left operand: Hopper's FP8 instructions want 64 rows there, and 8 or more on the right.
    """
    i_n, i_part, i_t = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    first = i_part * part_columns
    end = min(K, first + part_columns)
    o_n, o_t = i_n * BLOCK_N + tl.arange(0, BLOCK_N), i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_k = first + tl.arange(0, 128)
    m_t, m_n = o_t < T, o_n < N
    p_x = x_ptr + o_t.to(tl.int64)[None, :] * K + o_k[:, None]
    p_w = w_ptr + o_n[:, None] * w_stride_n + o_k[None, :]
    p_x_scale = x_scale_ptr + o_t * x_scale_stride_t
    p_scale = scale_ptr + i_n * BLOCK_N // 128 * scale_stride_n
    b_acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for i_k in range(first // 128, end // 128):
        b_w = tl.load(p_w, mask=m_n[:, None], other=0.0)
        b_x = tl.load(p_x, mask=m_t[None, :], other=0.0)
        b_part = tl.dot(b_w, b_x)
        if not BY_ROW:
            b_x_scale = tl.load(p_x_scale + i_k * x_scale_stride_k, mask=m_t, other=0.0)
            b_part *= (b_x_scale * tl.load(p_scale + i_k).to(tl.float32))[None, :]
        b_acc += b_part
        p_x += 128
        p_w += 128
    if BY_ROW:
        b_w_scale = tl.load(scale_ptr + o_n * scale_stride_n, mask=m_n, other=0.0).to(tl.float32)
        b_acc *= b_w_scale[:, None] * tl.load(p_x_scale, mask=m_t, other=0.0)[None, :]
    if HAS_BIAS:
        b_acc += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    p_y = y_ptr + i_part * y_stride_part + o_t.to(tl.int64)[None, :] * N + o_n[:, None]
    tl.store(p_y, b_acc.to(y_ptr.dtype.element_ty), mask=m_t[None, :] & m_n[:, None])


@kernel
def add_parts(
    parts_ptr, bias_ptr, y_ptr, N, parts, part_stride,
    BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] = sum of parts [parts, T, N] in their order, + bias."""
    wait_for_inputs(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_y = tl.zeros([BLOCK_N], dtype=tl.float32)
    for i in range(parts):
        b_y += tl.load(parts_ptr + i * part_stride + i_t * N + o_n, mask=m_n, other=0.0)
    if HAS_BIAS:
        b_y += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + i_t * N + o_n, b_y.to(y_ptr.dtype.element_ty), mask=m_n)


PROGRAMS, MOST_PARTS = 160, 4
"""Programs that `multiply_thin` aims at, about one a multiprocessor, and the most parts that K is cut into."""

TILES = read_tiles(__file__, "triton_block_fp8_tiles.json")
"""Tile shapes by tokens; rows without `together` are for `multiply_thin`."""
NARROW, LEAST_WIDE = read_tiles(__file__, "triton_block_fp8_narrow_tiles.json"), 70
"""The same for products with fewer than so many tiles of 64 tokens by 128 columns, all by `multiply_thin`."""


def product(x: Weight, weight: Packed, bias: Tensor | None, dtype: torch.dtype, **tuning: int) -> Tensor:
    """x [T, K], columns adjacent, or packed. tuning: entries of `TILES` to replace."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    data, scale = weight.parts["data"], weight.parts["scale"]
    narrow = cdiv(rows, 128) * cdiv(tokens, 64) < LEAST_WIDE
    shape = tile_for(NARROW if narrow else TILES, tokens) | tuning
    y = torch.empty((tokens, rows), dtype=dtype, device=x.device)
    if not tokens:
        return y
    by_row = weight.format.by_row
    if isinstance(x, Packed):
        source, source_scale = x.parts["data"], x.parts["scale"]
    elif by_row:
        source, source_scale = quantised_rows(x, data.dtype)
    else:
        source, source_scale = quantised(x, data.dtype)
    arguments = (source, source_scale, data, scale, y if bias is None else bias, y, tokens, rows, columns)
    common: dict[str, Any] = {
        "x_scale_stride_t": source_scale.stride(0), "x_scale_stride_k": source_scale.stride(1), "w_stride_n": data.stride(0), "scale_stride_n": scale.stride(0),
        "BLOCK_T": shape["block_t"], "BLOCK_N": shape["block_n"], "HAS_BIAS": bias is not None, "BY_ROW": by_row,
        "num_warps": shape["warps"], "num_stages": shape["stages"],
    }  # fmt: skip
    tiles_n, tiles_t = cdiv(rows, shape["block_n"]), cdiv(tokens, shape["block_t"])
    if "together" not in shape:
        # Few column tiles leave multiprocessors idle: cut K, so that there are about PROGRAMS of them.
        steps = columns // 128
        wanted = max(1, round(PROGRAMS / (tiles_n * tiles_t)))
        per_part = cdiv(steps, shape.get("parts", min(MOST_PARTS, wanted)))
        parts = cdiv(steps, per_part)
        partial = torch.empty((parts, tokens, rows), dtype=torch.float32, device=x.device) if parts > 1 else y
        options = common | {"HAS_BIAS": bias is not None and parts == 1}
        multiply_thin[(tiles_n, parts, tiles_t)](
            *arguments[:5], partial, *arguments[6:], part_columns=per_part * 128, y_stride_part=tokens * rows, **options
        )
        if parts > 1:
            add_parts[(tokens, cdiv(rows, 512))](
                partial, arguments[4], y, rows, parts, tokens * rows, BLOCK_N=512, HAS_BIAS=bias is not None,
                **dependent_launch(y),
            )  # fmt: skip
    else:
        multiply[(tiles_t * tiles_n,)](
            *arguments, TILES_TOGETHER=shape["together"], **common, **register_limit(shape.get("registers", 0)),
            **dependent_launch(y),
        )  # fmt: skip
    return y
