"""torch's block-scaled FP8 product (cuBLASLt) for many tokens, the activations quantised by one Triton kernel.

The scheme is that of `triton_block_fp8`: one scale a token and 128 columns, one a block of 128 x 128 weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.linear import triton_block_fp8
from firstlight.ops.op import Call
from firstlight.quant import FLOAT8_BY_COLUMN, Packed, Weight

SCALE_COLUMNS = 4
"""cuBLASLt reads rows of weight scales in fours."""
LEAST_TOKENS = 256
"""Below it, tiles of its fixed size are mostly empty."""


def when(call: Call) -> str | None:
    """Many tokens on a Hopper GPU, results in bfloat16, no bias."""
    if reason := triton_block_fp8.when(call):
        return reason
    x, weight = call.args[:2]
    if isinstance(x, Packed) and x.format != FLOAT8_BY_COLUMN:
        return f"reads activations packed as {FLOAT8_BY_COLUMN}, not {x.format}"
    if reason := refusal(call):
        return reason
    if weight.shape[0] % triton_block_fp8.BLOCK or weight.shape[1] % (SCALE_COLUMNS * triton_block_fp8.BLOCK):
        return f"needs rows a multiple of 128 and columns of 512, not {weight.shape}"
    return None


def refusal(call: Call) -> str | None:
    """Why torch's scaled FP8 products aren't for a call, whatever their scales: they are for many tokens on Hopper."""
    x = call.args[0]
    bias = call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")
    if call.hardware.architecture != "sm_90":
        return f"serves sm_90, not {call.hardware.architecture}"
    given = call.kwargs.get("dtype") or (None if isinstance(x, Packed) else x.dtype)
    if bias is not None or given != torch.bfloat16:
        return "gives bfloat16 without a bias"
    if x.shape[0] < LEAST_TOKENS:
        return f"serves {LEAST_TOKENS} tokens or more, not {x.shape[0]}"
    return None


def workspace(call: Call) -> int:
    """Quantised activations with their scales, and the weight's scales in float32: bytes."""
    return triton_block_fp8.quantised_bytes(call.args[0]) + 4 * call.args[1].parts["scale"].numel()


def run(x: Weight, weight: Packed, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """The contract of `linear`. Tolerance: 4 % of the result's RMS, from the activations' quantisation."""
    from firstlight.ops.linear.triton_quantise import quantised_tokens

    if not isinstance(x, Packed):
        x = quantised_tokens(x if x.stride(1) == 1 else x.contiguous(), FLOAT8_BY_COLUMN)
    tokens, rows = x.shape[0], x.parts["data"]
    data, scale = weight.parts["data"], weight.parts["scale"].float()
    y = torch._scaled_mm(rows, data.t(), scale_a=x.parts["scale"], scale_b=scale.t(), out_dtype=torch.bfloat16)
    return y[:tokens] if tokens < len(y) else y
