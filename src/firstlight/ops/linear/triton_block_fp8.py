"""FP8 block weights times many tokens, multiplied in FP8: twice the rate of bfloat16, half its bytes.

Activations are quantised to one scale a token and 128 columns, the scheme that such checkpoints declare (`activation_scheme:
dynamic`). Each 128 columns are summed by the matrix unit, then scaled and added in float32: FP8 units keep too few bits to
add up a long row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.linear.triton_skinny import weight_refusal
from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable
from firstlight.quant import Packed

BLOCK = 128
MOST_CUT, MOST_PARTS, PARTIAL_BYTES = 512, 8, 8 << 20
"""Tokens up to which K may be cut, into how many parts at most, and bounds of their sums: some 160 tiles in float32."""
LEAST_TOKENS = 2
"""One token is quicker as a dot product, without being quantised."""


def when(call: Call) -> str | None:
    """FP8 in blocks of 128 x 128, columns a multiple of 128, bfloat16 or float16 activations."""
    if reason := unavailable(call.hardware):
        return reason
    x, weight = call.args[:2]
    if isinstance(x, Packed) or x.dtype not in (torch.bfloat16, torch.float16):
        return f"the activations are {x.format if isinstance(x, Packed) else x.dtype}"
    if x.shape[0] < LEAST_TOKENS:
        return f"serves {LEAST_TOKENS} tokens or more, not {x.shape[0]}"
    if not isinstance(weight, Packed):
        return "reads FP8 weights only"
    if reason := weight_refusal(weight):
        return reason
    if weight.format.block != (BLOCK, BLOCK) or weight.shape[1] % BLOCK:
        return f"needs blocks of {BLOCK} x {BLOCK} that divide the columns; they are {weight.format.block} of {weight.shape[1]}"
    return None


def workspace(call: Call) -> int:
    """Quantised activations with their scales, and for few tokens the partial sums of tiles that K is cut for: bytes."""
    tokens, columns = call.args[0].shape
    partial = min(PARTIAL_BYTES, tokens * call.args[1].shape[0] * 4 * MOST_PARTS)
    return quantised_bytes(tokens, columns) + (partial if tokens <= MOST_CUT else 0)


def quantised_bytes(tokens: int, columns: int) -> int:
    """Activations in FP8, and a scale in float32 for each 128 of them."""
    return tokens * (columns + 4 * -(-columns // BLOCK))


def run(x: Tensor, weight: Packed, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """The contract of `linear`. Tolerance: 4 % of the result's RMS, from the activations' quantisation."""
    from firstlight.ops.linear import triton_block_fp8_kernel as kernels

    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear: x has {x.shape[1]} columns, the weight {weight.shape[1]}")
    return kernels.product(x if x.stride(1) == 1 else x.contiguous(), weight, bias, dtype or x.dtype)
