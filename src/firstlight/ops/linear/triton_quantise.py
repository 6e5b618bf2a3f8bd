"""Activations to FP8, one scale a token and 128 columns, or one a token: scale = max|group| / largest finite value.

Kernel module: it needs triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two
from firstlight.quant import Format, Packed, Weight
from firstlight.quant.activations import empty_packed

LEAST = tl.constexpr(1e-10)
"""Least maximum of a group: a group of zeros has a scale, and its elements are zeros."""


@triton.jit
def scale_of(b_most, DTYPE: tl.constexpr):
    """The scale of groups whose largest absolute values are b_most."""
    LIMIT: tl.constexpr = 240.0 if tl.float8e4b8 == DTYPE else 448.0
    return tl.maximum(b_most, LEAST) / LIMIT


@triton.jit
def saturated(b_x, DTYPE: tl.constexpr):
    """Float32 in an FP8 dtype: what is beyond its largest number becomes that, and NaN stays NaN."""
    LIMIT: tl.constexpr = 240.0 if tl.float8e4b8 == DTYPE else 448.0
    return tl.clamp(b_x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit
def quantise_columns(b_x, DTYPE: tl.constexpr):
    """A tile [M, 128] in float32 -> (tile in DTYPE, scale [M])."""
    b_scale = scale_of(tl.max(tl.abs(b_x), axis=1), DTYPE)
    return saturated(b_x / b_scale[:, None], DTYPE), b_scale


@triton.jit
def quantise_tokens(b_x, DTYPE: tl.constexpr):
    """A tile [128, M] in float32, a token a column -> (tile in DTYPE, scale [M])."""
    b_scale = scale_of(tl.max(tl.abs(b_x), axis=0), DTYPE)
    return saturated(b_x / b_scale[None, :], DTYPE), b_scale


@triton.jit
def groups_of_program(BLOCK_T: tl.constexpr, GROUPS: tl.constexpr):
    """A program's BLOCK_T tokens and GROUPS groups of each: tokens [M], groups [M], and their columns [M, 128]."""
    o_r = tl.arange(0, BLOCK_T * GROUPS)
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + o_r // GROUPS
    o_group = tl.program_id(1) * GROUPS + o_r % GROUPS
    return o_t, o_group, o_group[:, None] * 128 + tl.arange(0, 128)[None, :]


@kernel
def quantise_rows(
    x_ptr, y_ptr, scale_ptr, T, K, x_stride_t, scale_stride_t, scale_stride_k,
    BLOCK_T: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, K] and scale [T, K / 128] of x [T, K]."""
    wait_for_inputs(PDL)
    o_t, o_group, o_k = groups_of_program(BLOCK_T, GROUPS)
    m_t = o_t < T
    mask = m_t[:, None] & (o_k < K)
    b_x = tl.load(x_ptr + o_t[:, None] * x_stride_t + o_k, mask=mask, other=0.0).to(tl.float32)
    b_y, b_scale = quantise_columns(b_x, y_ptr.dtype.element_ty)
    tl.store(y_ptr + o_t[:, None] * K + o_k, b_y, mask=mask)
    tl.store(scale_ptr + o_t * scale_stride_t + o_group * scale_stride_k, b_scale, mask=m_t & (o_group * 128 < K))


@kernel
def quantise_whole_rows(
    x_ptr, y_ptr, scale_ptr, K, x_stride_t, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a token: y [T, K] and scale [T] of x [T, K], which is read twice."""
    wait_for_inputs(PDL)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    i_t = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    b_most = tl.zeros([BLOCK_K], dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        b_x = tl.load(x_ptr + i_t * x_stride_t + i_k + o_k, mask=i_k + o_k < K, other=0.0).to(tl.float32)
        b_most = tl.maximum(b_most, tl.abs(b_x))
    scale = scale_of(tl.max(b_most, axis=0), DTYPE)
    tl.store(scale_ptr + i_t, scale)
    for i_k in range(0, K, BLOCK_K):
        mask = i_k + o_k < K
        b_x = tl.load(x_ptr + i_t * x_stride_t + i_k + o_k, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + i_t * K + i_k + o_k, saturated(b_x / scale, DTYPE), mask=mask)


@triton.jit
def store_packed(
    b_y, first, rows, column, columns, data_ptr, scale_ptr, scale_stride_t, scale_stride_k,
    HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Stores part of a result quantised, its scales where the strides say.

    The result is [rows, columns] with HEADS rows a token; b_y is its part from row `first` and column `column` on, BLOCK_R x BLOCK_D
    values that are rounded to the result's dtype. Columns are in whole groups.
    """
    GROUPS: tl.constexpr = BLOCK_D // 128
    o_m = tl.arange(0, BLOCK_R * GROUPS)
    o_r, o_column = first + o_m // GROUPS, column + o_m % GROUPS * 128
    mask = (o_r < rows) & (o_column < columns)
    b_data, b_scale = quantise_columns(b_y.to(tl.float32).reshape(BLOCK_R * GROUPS, 128), data_ptr.dtype.element_ty)
    o_y = (o_r.to(tl.int64) * columns + o_column)[:, None] + tl.arange(0, 128)[None, :]
    tl.store(data_ptr + o_y, b_data, mask=mask[:, None])
    o_group = o_r % HEADS * (columns // 128) + o_column // 128
    tl.store(scale_ptr + o_r // HEADS * scale_stride_t + o_group * scale_stride_k, b_scale, mask=mask)


def packed_arguments(result: Weight) -> dict[str, Any]:
    """What a kernel that may call `store_packed` is given of a result: `data_ptr` and the rest, or None where it is plain."""
    if isinstance(result, Tensor):
        return {"data_ptr": None, "scale_ptr": None, "scale_stride_t": 0, "scale_stride_k": 0}
    scale = result.parts["scale"]
    return {
        "data_ptr": result.parts["data"], "scale_ptr": scale,
        "scale_stride_t": scale.stride(0), "scale_stride_k": scale.stride(1),
    }  # fmt: skip


def plain_part(result: Weight) -> Tensor | None:
    """The plain values of a result, if they are wanted."""
    return result if isinstance(result, Tensor) else result.plain


def quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, K], columns adjacent -> (x in `dtype` [T, K], scale float32 [T, ceil(K / 128)])."""
    tokens, columns = x.shape
    y = torch.empty((tokens, columns), dtype=dtype, device=x.device)
    scale = torch.empty((tokens, cdiv(columns, 128)), dtype=torch.float32, device=x.device)
    _quantise(x, y, scale)
    return y, scale


def quantised_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, K], columns adjacent -> (x in `dtype` [T, K], scale float32 [T, 1])."""
    tokens, columns = x.shape
    y = torch.empty((tokens, columns), dtype=dtype, device=x.device)
    scale = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    if tokens:
        block = min(power_of_two(columns), 4096)
        quantise_whole_rows[(tokens,)](
            x, y, scale, columns, x.stride(0), BLOCK_K=block, num_warps=8 if block >= 4096 else 4, **dependent_launch(x)
        )
    return y, scale


def quantised_tokens(x: Tensor, form: Format) -> Packed:
    """x [T, K], columns adjacent -> the same in `FLOAT8_BY_TOKEN` or `FLOAT8_BY_COLUMN`."""
    packed = empty_packed(x.shape, form, x.device)
    _quantise(x, packed.parts["data"], packed.parts["scale"])
    return packed


def _quantise(x: Tensor, y: Tensor, scale: Tensor) -> None:
    tokens, columns = x.shape
    groups = cdiv(columns, 128)
    share = min(power_of_two(groups), 16)
    block_t = max(1, 32 // share) if tokens >= 1024 else 1
    quantise_rows[(cdiv(tokens, block_t), cdiv(groups, share))](
        x, y, scale, tokens, columns, x.stride(0), scale.stride(0), scale.stride(1), BLOCK_T=block_t, GROUPS=share,
        **dependent_launch(x),
    )  # fmt: skip
