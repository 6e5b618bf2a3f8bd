"""FP8 weights with a scale a row times many tokens with a scale each, multiplied in FP8 ("per token, per channel").

The scheme of compressed-tensors' checkpoints by channel. What is summed up is scaled once; sums of 128 columns are still added in
float32, as FP8 matrix units keep too few bits to add up a long row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.linear import triton_block_fp8
from firstlight.ops.linear.triton_block_fp8 import BLOCK, LEAST_TOKENS, partial_bytes
from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable
from firstlight.quant import E4M3FNUZ, PLAIN, Packed

SUPPORTED = (torch.bfloat16, torch.float16)
"""Dtypes of activations."""


def when(call: Call) -> str | None:
    """FP8 with a scale a row, columns a multiple of 128; activations in bfloat16 or float16."""
    if reason := unavailable(call.hardware):
        return reason
    x, weight = call.args[:2]
    if isinstance(x, Packed):
        return f"quantises the activations itself; they are {x.format}"
    if x.dtype not in SUPPORTED:
        return f"the activations are {x.dtype}"
    if x.shape[0] < LEAST_TOKENS:
        return f"serves {LEAST_TOKENS} tokens or more, not {x.shape[0]}"
    if not isinstance(weight, Packed):
        return "reads FP8 weights only"
    form = weight.format
    if form.dtype != "float8_e4m3fn" or not form.by_row or form.layout not in (PLAIN, E4M3FNUZ.name):
        return f"reads float8_e4m3fn with a scale a row, and the weight is {form}"
    return f"needs columns in whole {BLOCK}s, not {weight.shape[1]}" if weight.shape[1] % BLOCK else None


def quantised_bytes(x: Tensor) -> int:
    """Activations in FP8, and a scale in float32 for each token."""
    return int(x.shape[0] * (x.shape[1] + 4))


def workspace(call: Call) -> int:
    """Quantised activations with their scales, and for few tokens the partial sums of tiles that K is cut for: bytes."""
    x, weight = call.args[:2]
    return quantised_bytes(x) + partial_bytes(x.shape[0], weight.shape[0])


def run(x: Tensor, weight: Packed, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """The contract of `linear`. Tolerance: 4 % of the result's RMS, from the activations' quantisation."""
    return triton_block_fp8.run(x, weight, bias, dtype=dtype)  # whose kernels tell by the weight where to scale
