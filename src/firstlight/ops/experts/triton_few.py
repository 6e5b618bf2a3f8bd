"""Experts for a few tokens, centred on the output: nothing is sorted, padded or scattered.

Two launches. In the first a program owns (token, one of its experts, a run of the intermediate): two dot products a column,
silu, product. In the second a program owns (token, a run of the hidden size) and sums over the token's experts, weighted,
in a fixed order. An expert that several tokens chose is read once for each, which the L2 cache softens.
FP8 weights are widened as they arrive and activations keep their precision, so this rounds less than the reference.
"""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.linear.triton_skinny import SUPPORTED, weight_refusal
from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable
from firstlight.quant import Packed, Weight

MOST_TOKENS = 8


def when(call: Call) -> str | None:
    """Up to 8 tokens of floats."""
    if reason := unavailable(call.hardware):
        return reason
    x, _, _, gate_up, down = call.args
    if isinstance(x, Packed) or x.dtype not in SUPPORTED:
        return f"the activations are {x.format if isinstance(x, Packed) else x.dtype}"
    if x.shape[0] > MOST_TOKENS:
        return f"serves up to {MOST_TOKENS} tokens, not {x.shape[0]}"
    if isinstance(gate_up, Packed) != isinstance(down, Packed):
        return "reads both projections packed or both plain"
    return weight_refusal(gate_up) or weight_refusal(down)


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, *, first_expert: int = 0) -> Tensor:
    """The contract of `experts`. Tolerance: two roundings of x.dtype, of the intermediate and of the result."""
    from firstlight.ops.experts import triton_few_kernels as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    return kernels.experts(x, weights.contiguous(), experts.contiguous(), gate_up, down, first_expert)
