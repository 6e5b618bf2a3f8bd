"""Activations to FP8, one scale a token and 128 columns: scale = max|group| / largest finite value.

Kernel module: it needs triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two

LEAST = tl.constexpr(1e-10)
"""Least maximum of a group: a group of zeros has a scale, and its elements are zeros."""


@triton.jit
def quantise_columns(b_x, DTYPE: tl.constexpr):
    """A tile [M, 128] in float32 -> (tile in DTYPE, scale [M])."""
    LIMIT: tl.constexpr = 240.0 if tl.float8e4b8 == DTYPE else 448.0
    b_scale = tl.maximum(tl.max(tl.abs(b_x), axis=1), LEAST) / LIMIT
    return tl.clamp(b_x / b_scale[:, None], -LIMIT, LIMIT).to(DTYPE), b_scale


@triton.jit
def quantise_tokens(b_x, DTYPE: tl.constexpr):
    """A tile [128, M] in float32, a token a column -> (tile in DTYPE, scale [M])."""
    LIMIT: tl.constexpr = 240.0 if tl.float8e4b8 == DTYPE else 448.0
    b_scale = tl.maximum(tl.max(tl.abs(b_x), axis=0), LEAST) / LIMIT
    return tl.clamp(b_x / b_scale[None, :], -LIMIT, LIMIT).to(DTYPE), b_scale


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


def quantised(x: Tensor, dtype: torch.dtype, column_major: bool = False) -> tuple[Tensor, Tensor]:
    """(x in `dtype` [T, K], scale float32 [T, ceil(K / 128)]); column_major: tokens of a group's scales are neighbours."""
    tokens, columns = x.shape
    groups = cdiv(columns, 128)
    y = torch.empty((tokens, columns), dtype=dtype, device=x.device)
    shape = (groups, tokens) if column_major else (tokens, groups)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    scale = scale.t() if column_major else scale
    share = min(power_of_two(groups), 16)
    block_t = max(1, 32 // share) if tokens >= 1024 else 1
    quantise_rows[(cdiv(tokens, block_t), cdiv(groups, share))](
        x, y, scale, tokens, columns, x.stride(0), scale.stride(0), scale.stride(1), BLOCK_T=block_t, GROUPS=share,
        **dependent_launch(x),
    )  # fmt: skip
    return y, scale
