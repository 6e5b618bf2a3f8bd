"""Kernels of `triton_skinny`: y [T, N] = x [T, K] W^T, W [N, K] row-major, T small."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.triton_launch import dependent_launch, kernel, let_next_begin, wait_for_earlier
from firstlight.ops.triton_support import cdiv, power_of_two
from firstlight.quant import Packed, Weight, format_of


@triton.jit
def scales_of(scale_ptr, i_k, K, BLOCK_K: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Scales of columns i_k to i_k + BLOCK_K of a row of blocks in float32, one a block; of plain weights, ones."""
    BLOCKS: tl.constexpr = max(BLOCK_K // SCALE_COLUMNS, 1)
    if not HAS_SCALE:
        return tl.full([BLOCKS], 1.0, dtype=tl.float32)
    o_k = i_k + tl.arange(0, BLOCKS) * SCALE_COLUMNS
    return tl.load(scale_ptr + o_k // SCALE_COLUMNS, mask=o_k < K, other=0.0).to(tl.float32)


@triton.jit
def times_scales(x_ptr, b_scale, i_k, K, BLOCK_K: tl.constexpr, SCALE_COLUMNS: tl.constexpr):
    """x[i_k : i_k + BLOCK_K] in float32, times `scales_of` these columns: one multiply here saves one a row."""
    RUN: tl.constexpr = min(BLOCK_K, SCALE_COLUMNS)
    o_k = i_k + (tl.arange(0, BLOCK_K // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    b_x = tl.load(x_ptr + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    return (b_x * b_scale[:, None]).reshape(BLOCK_K)


@triton.jit
def scaled_input(
    x_ptr, scale_ptr, i_k, K, BLOCK_K: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_SCALE: tl.constexpr
):  # fmt: skip
    """x[i_k : i_k + BLOCK_K] in float32, times the scales of a row of blocks."""
    b_scale = scales_of(scale_ptr, i_k, K, BLOCK_K, SCALE_COLUMNS, HAS_SCALE)
    return times_scales(x_ptr, b_scale, i_k, K, BLOCK_K, SCALE_COLUMNS)


@triton.jit
def dots(
    b_w, b_scale, x_ptr, x_stride_t, i_k, K,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, TOKENS]: a tile of weights from column i_k on times each token."""
    b_w = b_w.to(tl.float32)
    b_y = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    for t in tl.static_range(TOKENS):
        b_x = times_scales(x_ptr + t * x_stride_t, b_scale, i_k, K, BLOCK_K, SCALE_COLUMNS)
        b_part = tl.sum(b_w * b_x[None, :], axis=1)
        b_y += tl.where(tl.arange(0, TOKENS)[None, :] == t, b_part[:, None], 0.0)
    return b_y


@kernel
def multiply(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr,
    N, x_stride_t, w_stride_n, scale_stride_n,
    K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_SCALE: tl.constexpr, BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N rows, which share their scales: BLOCK_N divides SCALE_ROWS. BY_ROW: each row has one scale instead.

    Its first tile of weights, with the scales, is asked for before the wait; and the next kernel may begin at once, to do the same.
    """
    let_next_begin(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    o_n, o_t, o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    m_n = o_n < N
    p_row_scale = scale_ptr + o_n * scale_stride_n
    scale_ptr += i_n * BLOCK_N // SCALE_ROWS * scale_stride_n
    p_w = w_ptr + o_n[:, None] * w_stride_n + o_k[None, :]
    b_w = tl.load(p_w, mask=m_n[:, None] & (o_k < K)[None, :], other=0.0)
    b_scale = scales_of(scale_ptr, 0, K, BLOCK_K, SCALE_COLUMNS, HAS_SCALE)
    if BY_ROW:
        b_row_scale = tl.load(p_row_scale, mask=m_n, other=0.0).to(tl.float32)
    wait_for_earlier(PDL)
    b_y = dots(b_w, b_scale, x_ptr, x_stride_t, 0, K, TOKENS, BLOCK_N, BLOCK_K, SCALE_COLUMNS)
    for i_k in range(BLOCK_K, K, BLOCK_K):
        b_w = tl.load(p_w + i_k, mask=m_n[:, None] & (i_k + o_k < K)[None, :], other=0.0)
        b_scale = scales_of(scale_ptr, i_k, K, BLOCK_K, SCALE_COLUMNS, HAS_SCALE)
        b_y += dots(b_w, b_scale, x_ptr, x_stride_t, i_k, K, TOKENS, BLOCK_N, BLOCK_K, SCALE_COLUMNS)
    if BY_ROW:
        b_y *= b_row_scale[:, None]
    if HAS_BIAS:
        b_y += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + o_t[None, :] * N + o_n[:, None], b_y.to(y_ptr.dtype.element_ty), mask=m_n[:, None])


def divisor(size: int, limit: int) -> int:
    """The largest power of two that divides `size`, up to `limit`."""
    return min(size & -size, limit)


def parts_of(weight: Weight) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """(data, scale, block) of a weight; a plain one is its own scale, unread."""
    if isinstance(weight, Packed):
        assert weight.format.block is not None
        return weight.parts["data"], weight.parts["scale"], weight.format.block
    return weight, weight, (128, 128)


def tile_of(rows: int, columns: int, tokens: int, is_fp8: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps, as measured on an H200.

    Many rows of FP8 go in steps of 1,024 columns, of which a program asks for the next while it multiplies; few rows are all on
    the way at once. Tokens share registers with the weights, so that they get fewer rows.
    """
    if not is_fp8:
        return (
            8 if rows >= 4096 else 4 if rows >= 1024 else 2,
            min(power_of_two(columns), 1024 if rows >= 4096 else 2048),
            4,
        )
    if tokens == 1 and rows >= 4096:
        return 8, min(power_of_two(columns), 1024), 2
    # As many columns at once as can be without computing more than an eighth in vain behind the last.
    whole = [size for size in (4096, 2048) if cdiv(columns, size) * size * 8 <= columns * 9]
    block_k = whole[0] if whole else min(power_of_two(columns), 1024)
    block_n = 2 if rows < 1024 else 8 if tokens == 1 and rows >= 2048 else 4
    return block_n, block_k, max(1, block_k // 1024)


def product(x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype, **tuning: int) -> Tensor:
    """x [T, K], columns adjacent, T from 1 to 8. tuning: block_n, block_k, num_warps in place of the defaults."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    data, scale, block = parts_of(weight)
    together = 1 << tokens.bit_length() - 1  # a tile's sizes are powers of two
    if together < tokens:
        halves = (x[:together], x[together:])
        return torch.cat([product(half, weight, bias, dtype, **tuning) for half in halves])
    y = torch.empty((tokens, rows), dtype=dtype, device=x.device)
    block_n, block_k, warps = tile_of(rows, columns, tokens, data.element_size() == 1)
    block_n, block_k = tuning.get("block_n", block_n), tuning.get("block_k", block_k)
    by_row = format_of(weight).by_row
    block_n, warps = block_n if by_row else divisor(block[0], block_n), tuning.get("num_warps", warps)
    multiply[(cdiv(rows, block_n),)](
        x, data, scale, x if bias is None else bias, y, rows,
        x_stride_t=x.stride(0), w_stride_n=data.stride(0), scale_stride_n=scale.stride(0), K=columns,
        TOKENS=tokens, BLOCK_N=block_n, BLOCK_K=block_k, SCALE_ROWS=block[0], SCALE_COLUMNS=block[1],
        HAS_SCALE=isinstance(weight, Packed) and not by_row, BY_ROW=by_row, HAS_BIAS=bias is not None, num_warps=warps,
        **dependent_launch(x),
    )  # fmt: skip
    return y
