"""Experts for a few tokens, centred on the output: nothing is sorted, padded or scattered.

Two launches. In the first a program owns (token, one of its experts, a run of the intermediate): two dot products a column,
silu, product. In the second a program owns (token, a run of the hidden size) and sums over the token's experts, weighted,
in a fixed order. An expert that several tokens chose is read once for each, which the L2 cache softens.
FP8 weights, with a scale a block or a row, are widened as they arrive and activations keep their precision, so this rounds less
than the reference.
"""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.linear.triton_skinny import SUPPORTED, weight_refusal
from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable
from firstlight.quant import Packed, Weight, format_of

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
    return projections_refusal(gate_up, down)


def projections_refusal(gate_up: Weight, down: Weight) -> str | None:
    """Why kernels of experts can't read their weights, or None: each can be read, and both have the same kind of scales."""
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if reason := weight_refusal(weight):
            return f"{name}: {reason}"
    first, second = format_of(gate_up), format_of(down)
    if (first.is_plain, first.by_row) != (second.is_plain, second.by_row):
        return f"reads both projections plain, with a scale a block or with one a row, not {first} and {second}"
    return None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, *, first_expert: int = 0) -> Tensor:
    """The contract of `experts`. Tolerance: two roundings of x.dtype, of the intermediate and of the result."""
    from firstlight.ops.experts import triton_few_kernels as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    return kernels.experts(x, weights.contiguous(), experts.contiguous(), gate_up, down, first_expert)
