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
from firstlight.quant import FLOAT8_BY_COLUMN, FLOAT8_BY_TOKEN, Packed, Weight, format_of, plain

BLOCK = 128
MOST_CUT, MOST_PARTS, PARTIAL_BYTES = 512, 8, 8 << 20
"""Tokens up to which K may be cut, into how many parts at most, and bounds of their sums: some 160 tiles in float32."""
READ = (plain(torch.bfloat16), plain(torch.float16), FLOAT8_BY_TOKEN, FLOAT8_BY_COLUMN)
"""Formats of activations."""
LEAST_TOKENS = 2
"""One token is quicker as a dot product, without being quantised."""


def when(call: Call) -> str | None:
    """FP8 in blocks of 128 x 128, columns a multiple of 128; activations in bfloat16, float16 or packed."""
    if reason := unavailable(call.hardware):
        return reason
    x, weight = call.args[:2]
    if format_of(x) not in READ:
        return f"the activations are {format_of(x)}"
    if x.shape[0] < LEAST_TOKENS:
        return f"serves {LEAST_TOKENS} tokens or more, not {x.shape[0]}"
    if not isinstance(weight, Packed):
        return "reads FP8 weights only"
    if reason := weight_refusal(weight):
        return reason
    if weight.format.block != (BLOCK, BLOCK):
        return f"needs blocks of {BLOCK} x {BLOCK}, and the weight is {weight.format}"
    return f"needs columns in whole {BLOCK}s, not {weight.shape[1]}" if weight.shape[1] % BLOCK else None


def workspace(call: Call) -> int:
    """Quantised activations with their scales, and for few tokens the partial sums of tiles that K is cut for: bytes."""
    x, weight = call.args[:2]
    return quantised_bytes(x) + partial_bytes(x.shape[0], weight.shape[0])


def partial_bytes(tokens: int, rows: int) -> int:
    """Sums of parts of K, where K may be cut for so few tokens."""
    return min(PARTIAL_BYTES, tokens * rows * 4 * MOST_PARTS) if tokens <= MOST_CUT else 0


def quantised_bytes(x: Weight) -> int:
    """Activations in FP8, and a scale in float32 for each 128 of them; nothing if they come so."""
    if isinstance(x, Packed):
        return 0
    tokens, columns = x.shape
    return int(tokens * (columns + 4 * -(-columns // BLOCK)))


def run(x: Weight, weight: Packed, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """The contract of `linear`. Tolerance: 4 % of the result's RMS, from the activations' quantisation."""
    from firstlight.ops.linear import triton_block_fp8_kernel as kernels

    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear: x has {x.shape[1]} columns, the weight {weight.shape[1]}")
    if isinstance(x, Packed):
        if dtype is None:
            raise TypeError(f"linear of {x.format} activations needs dtype=, the dtype of the result")
        return kernels.product(x, weight, bias, dtype)
    return kernels.product(x if x.stride(1) == 1 else x.contiguous(), weight, bias, dtype or x.dtype)
