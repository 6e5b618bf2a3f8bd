"""torch's FP8 product with a scale a token and one a row of weights, for many tokens, the activations quantised by one Triton kernel.

The scheme of `triton_row_fp8`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.linear import triton_row_fp8
from firstlight.ops.linear.torch_block_fp8 import refusal
from firstlight.ops.op import Call
from firstlight.quant import Packed

MULTIPLE = 16
"""torch takes rows and columns of weights in multiples of so many."""


def when(call: Call) -> str | None:
    """Many tokens on a Hopper GPU, results in bfloat16, no bias."""
    if reason := triton_row_fp8.when(call) or refusal(call):
        return reason
    weight = call.args[1]
    return f"needs rows in multiples of {MULTIPLE}, not {weight.shape[0]}" if weight.shape[0] % MULTIPLE else None


def workspace(call: Call) -> int:
    """Quantised activations with their scales, and the weight's scales in float32: bytes."""
    return triton_row_fp8.quantised_bytes(call.args[0]) + 4 * call.args[1].parts["scale"].numel()


def run(x: Tensor, weight: Packed, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """The contract of `linear`. Tolerance: 4 % of the result's RMS, from the activations' quantisation."""
    from firstlight.ops.linear.triton_quantise import quantised_rows

    data, scale = weight.parts["data"], weight.parts["scale"].float()
    rows, row_scale = quantised_rows(x if x.stride(1) == 1 else x.contiguous(), data.dtype)
    return torch._scaled_mm(rows, data.t(), scale_a=row_scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
