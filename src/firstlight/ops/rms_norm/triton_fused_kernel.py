"""Kernel of `triton_fused`, and of the norms that add or gate around it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.linear.triton_quantise import packed_arguments, plain_part, store_packed
from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two
from firstlight.quant import Emission, Weight, empty_result


@triton.jit
def scaled(b_x, b_weight, D, eps, DTYPE: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    """Rows [R, BLOCK_D] in float32, zero past column D, over their root mean square and scaled: rounded as `rms_norm` says."""
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1) / D + eps)[:, None]
    if ZERO_CENTRED:
        return (b_y * (1.0 + b_weight)[None, :]).to(DTYPE)
    return (b_y.to(DTYPE).to(tl.float32) * b_weight[None, :]).to(DTYPE)


@kernel
def norm_rows(
    x_ptr, weight_ptr, y_ptr, data_ptr, scale_ptr, rows, heads, D, eps, x_stride_t, x_stride_h,
    scale_stride_t, scale_stride_k,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, ZERO_CENTRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [rows, D] from x [rows / heads, heads, D]; or packed, or both."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    b_weight = tl.load(weight_ptr + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    mask = (o_r < rows)[:, None] & (o_d < D)[None, :]
    p_x = x_ptr + (o_r // heads * x_stride_t + o_r % heads * x_stride_h)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b_y = scaled(b_x, b_weight, D, eps, x_ptr.dtype.element_ty, ZERO_CENTRED)
    if y_ptr is not None:
        tl.store(y_ptr + o_r[:, None] * D + o_d[None, :], b_y, mask=mask)
    if data_ptr is not None:
        first = tl.program_id(0).to(tl.int64) * BLOCK_R
        store_packed(b_y, first, rows, 0, D, data_ptr, scale_ptr, scale_stride_t, scale_stride_k, 1, BLOCK_R, BLOCK_D)


@kernel
def add_and_norm_rows(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, data_ptr, scale_ptr, D, eps, x_stride_t, residual_stride_t,
    scale_stride_t, scale_stride_k,
    BLOCK_D: tl.constexpr, ZERO_CENTRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row: sum = x + residual, rounded; y = its norm, plain, packed or both."""
    b_weight = tl.load(weight_ptr + tl.arange(0, BLOCK_D), mask=tl.arange(0, BLOCK_D) < D, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    mask = o_d < D
    b_x = tl.load(x_ptr + i_t * x_stride_t + o_d, mask=mask, other=0.0).to(tl.float32)
    b_residual = tl.load(residual_ptr + i_t * residual_stride_t + o_d, mask=mask, other=0.0).to(tl.float32)
    b_sum = (b_x + b_residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + i_t * D + o_d, b_sum, mask=mask)
    b_y = scaled(b_sum.to(tl.float32), b_weight, D, eps, x_ptr.dtype.element_ty, ZERO_CENTRED)
    if y_ptr is not None:
        tl.store(y_ptr + i_t * D + o_d, b_y, mask=mask)
    if data_ptr is not None:
        store_packed(b_y, i_t, i_t + 1, 0, D, data_ptr, scale_ptr, scale_stride_t, scale_stride_k, 1, 1, BLOCK_D)


@kernel
def norm_and_gate_rows(
    x_ptr, gate_ptr, weight_ptr, y_ptr, rows, heads, D, eps, x_stride_t, x_stride_h, gate_stride_t, gate_stride_h,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [rows, D] = norm(x) * weight * silu(gate); x and gate [rows / heads, heads, D]; WIDE: dtype of norm * weight."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    b_weight = tl.load(weight_ptr + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    mask = (o_r < rows)[:, None] & (o_d < D)[None, :]
    p_x = x_ptr + (o_r // heads * x_stride_t + o_r % heads * x_stride_h)[:, None] + o_d[None, :]
    p_gate = gate_ptr + (o_r // heads * gate_stride_t + o_r % heads * gate_stride_h)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1) / D + eps)[:, None]
    b_y = (b_y.to(y_ptr.dtype.element_ty).to(tl.float32) * b_weight[None, :]).to(WIDE).to(tl.float32)
    b_y *= b_gate * tl.sigmoid(b_gate)
    tl.store(y_ptr + o_r[:, None] * D + o_d[None, :], b_y.to(y_ptr.dtype.element_ty), mask=mask)


def as_heads(x: Tensor) -> tuple[Tensor, int]:
    """(x as [tokens, heads, D], heads)."""
    x = x if x.dim() == 3 else x.unsqueeze(1)
    return x, x.shape[1]


def rows_together(columns: int) -> int:
    """Rows that a program takes: about 1,024 elements, eight for each of 128 threads."""
    return max(1, 1024 // columns)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool, emit: Emission | None = None) -> Weight:
    """x [T, D] or [T, heads, D], columns adjacent."""
    y = empty_result(x, x.shape, emit)
    x, heads = as_heads(x)
    rows, size = x.shape[0] * heads, x.shape[2]
    block_d = power_of_two(size)
    block_r = rows_together(block_d)
    if rows:
        norm_rows[(cdiv(rows, block_r),)](
            x, weight, plain_part(y), rows=rows, heads=heads, D=size, eps=eps, x_stride_t=x.stride(0),
            x_stride_h=x.stride(1), **packed_arguments(y),
            BLOCK_R=block_r, BLOCK_D=block_d, ZERO_CENTRED=zero_centred, num_warps=4 if block_d <= 4096 else 8, **dependent_launch(x),
        )  # fmt: skip
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool, emit: Emission | None = None
) -> tuple[Weight, Tensor]:
    """x and residual [T, D], columns adjacent -> (normed, sum)."""
    tokens, size = x.shape
    y, total = empty_result(x, x.shape, emit), x.new_empty(x.shape)
    block_d = power_of_two(size)
    if tokens:
        add_and_norm_rows[(tokens,)](
            x, residual, weight, plain_part(y), total, D=size, eps=eps, x_stride_t=x.stride(0),
            residual_stride_t=residual.stride(0), **packed_arguments(y),
            BLOCK_D=block_d, ZERO_CENTRED=zero_centred, num_warps=4 if block_d <= 4096 else 8, **dependent_launch(x),
        )  # fmt: skip
    return y, total


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x and gate [T, D] or [T, heads, D], columns adjacent."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = torch.promote_types(x.dtype, weight.dtype)
    (x, heads), (gate, _) = as_heads(x), as_heads(gate)
    rows, size = x.shape[0] * heads, x.shape[2]
    block_d = power_of_two(size)
    block_r = rows_together(block_d)
    if rows:
        norm_and_gate_rows[(cdiv(rows, block_r),)](
            x, gate, weight, y, rows, heads, size, eps, x.stride(0), x.stride(1), gate.stride(0), gate.stride(1),
            BLOCK_R=block_r, BLOCK_D=block_d, WIDE=getattr(tl, str(wide).removeprefix("torch.")),
            num_warps=4 if block_d <= 4096 else 8, **dependent_launch(x),
        )  # fmt: skip
    return y
