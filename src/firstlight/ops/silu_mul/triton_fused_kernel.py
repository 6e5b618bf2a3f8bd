"""Kernel of `triton_fused`, and of `sigmoid_mul`'s."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from firstlight.ops.linear.triton_quantise import packed_arguments, plain_part, store_packed
from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two
from firstlight.quant import Emission, Weight, empty_result

BLOCK = 1024


@kernel
def activate_and_multiply(
    x_ptr, gate_ptr, y_ptr, data_ptr, scale_ptr, N, x_stride_t, gate_stride_t, gate_stride_n,
    scale_stride_t, scale_stride_k,
    BLOCK_N: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] = x * silu(gate) or x * sigmoid(gate), the activation rounded to the gate's dtype first; plain, packed or both."""
    wait_for_inputs(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_gate = tl.load(gate_ptr + i_t * gate_stride_t + o_n * gate_stride_n, mask=m_n, other=0.0).to(tl.float32)
    b_x = tl.load(x_ptr + i_t * x_stride_t + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_active = tl.sigmoid(b_gate)
    if SILU:
        b_active *= b_gate
    b_y = (b_active.to(gate_ptr.dtype.element_ty).to(tl.float32) * b_x).to(x_ptr.dtype.element_ty)
    if y_ptr is not None:
        tl.store(y_ptr + i_t * N + o_n, b_y, mask=m_n)
    if data_ptr is not None:
        column = tl.program_id(1) * BLOCK_N
        store_packed(b_y, i_t, i_t + 1, column, N, data_ptr, scale_ptr, scale_stride_t, scale_stride_k, 1, 1, BLOCK_N)


def silu_mul(x: Tensor, emit: Emission | None = None) -> Weight:
    """x [T, 2 I], columns adjacent -> [T, I]."""
    size = x.shape[1] // 2
    return _run(x[:, size:], x, size, 1, True, emit)


def sigmoid_mul(x: Tensor, gate: Tensor, emit: Emission | None = None) -> Weight:
    """x [T, N], columns adjacent; gate [T, N] or [T, 1]."""
    return _run(x, gate, x.shape[1], 0 if gate.shape[1] == 1 else gate.stride(1), False, emit)


def _run(x: Tensor, gate: Tensor, columns: int, gate_stride_n: int, silu: bool, emit: Emission | None) -> Weight:
    tokens = x.shape[0]
    y = empty_result(x, (tokens, columns), emit)
    block = min(BLOCK, power_of_two(columns))
    if tokens:
        activate_and_multiply[(tokens, cdiv(columns, block))](
            x, gate, plain_part(y), N=columns, x_stride_t=x.stride(0), gate_stride_t=gate.stride(0),
            gate_stride_n=gate_stride_n, **packed_arguments(y), BLOCK_N=block, SILU=silu, **dependent_launch(x),
        )  # fmt: skip
    return y
