"""Products of up to four tokens: every weight is read once, and the matrix's rows are spread over all multiprocessors.

A dot product for each row and token, in float32 on the ordinary units: for so few tokens a matrix instruction is mostly
empty. FP8 weights are widened as they arrive, which is exact; activations keep their precision and a scale is applied in
float32, so no rounding is added to the reference's (which rounds element * scale to the result's dtype).
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable
from firstlight.quant import E4M3FNUZ, PLAIN, Packed, Weight, format_of

MOST_TOKENS = 4
SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)


def weight_refusal(weight: Weight) -> str | None:
    """Why the kernels can't read a weight: plain floats, or FP8 with a scale a block or a row, are what they know."""
    form = format_of(weight)
    if isinstance(weight, Tensor):
        return None if weight.dtype in SUPPORTED else f"the weight is {weight.dtype}"
    is_stored = form.dtype == "float8_e4m3fn" and form.layout in (PLAIN, E4M3FNUZ.name)
    if not is_stored or form.block is None:
        return f"reads float8_e4m3fn with a scale a block or a row, and the weight is {form}"
    if any(size & (size - 1) for size in form.block):
        return f"a tile has powers of two for sizes, and the blocks are {form.block}"
    return None


def when(call: Call) -> str | None:
    """One token of floats; up to four where the weights are FP8."""
    if reason := unavailable(call.hardware):
        return reason
    x, weight = call.args[:2]
    if isinstance(x, Packed):
        return f"the activations are {x.format}"
    if x.shape[0] > MOST_TOKENS:
        return f"serves up to {MOST_TOKENS} tokens, not {x.shape[0]}"
    if x.dtype not in SUPPORTED or (call.kwargs.get("dtype") or x.dtype) not in SUPPORTED:
        return f"serves {', '.join(map(str, SUPPORTED))}, not {x.dtype} -> {call.kwargs.get('dtype')}"
    if isinstance(weight, Tensor) and x.shape[0] > 1:
        return f"torch's product is quicker for plain weights and {x.shape[0]} tokens"
    return weight_refusal(weight)


def run(x: Tensor, weight: Weight, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """The contract of `linear`. Tolerance: the result's rounding."""
    from firstlight.ops.linear import triton_skinny_kernels as kernels

    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear: x has {x.shape[1]} columns, the weight {weight.shape[1]}")
    return kernels.product(x if x.stride(1) == 1 else x.contiguous(), weight, bias, dtype or x.dtype)
