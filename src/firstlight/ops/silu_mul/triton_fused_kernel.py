"""Kernel of `triton_fused`, and of `sigmoid_mul`'s."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two

BLOCK = 1024


@kernel
def activate_and_multiply(
    x_ptr, gate_ptr, y_ptr, N, x_stride_t, gate_stride_t, gate_stride_n,
    BLOCK_N: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] = x * silu(gate) or x * sigmoid(gate), the activation rounded to the gate's dtype first."""
    wait_for_inputs(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_gate = tl.load(gate_ptr + i_t * gate_stride_t + o_n * gate_stride_n, mask=m_n, other=0.0).to(tl.float32)
    b_x = tl.load(x_ptr + i_t * x_stride_t + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_active = tl.sigmoid(b_gate)
    if SILU:
        b_active *= b_gate
    b_y = b_active.to(gate_ptr.dtype.element_ty).to(tl.float32) * b_x
    tl.store(y_ptr + i_t * N + o_n, b_y.to(y_ptr.dtype.element_ty), mask=m_n)


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2 I], columns adjacent -> [T, I]."""
    size = x.shape[1] // 2
    return _run(x[:, size:], x, size, 1, True)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, N], columns adjacent; gate [T, N] or [T, 1]."""
    return _run(x, gate, x.shape[1], 0 if gate.shape[1] == 1 else gate.stride(1), False)


def _run(x: Tensor, gate: Tensor, columns: int, gate_stride_n: int, silu: bool) -> Tensor:
    tokens = x.shape[0]
    y = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    block = min(BLOCK, power_of_two(columns))
    if tokens:
        activate_and_multiply[(tokens, cdiv(columns, block))](
            x, gate, y, columns, x.stride(0), gate.stride(0), gate_stride_n, BLOCK_N=block, SILU=silu,
            **dependent_launch(x),
        )  # fmt: skip
    return y
