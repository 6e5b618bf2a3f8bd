"""Experts for many tokens: each expert's pairs (token, choice) are listed on the device and multiplied together.

Launches: clear the lists; fill them; quantise the tokens; gate and up with silu; down; weighted sum; and for many rows an
expert one that cuts the lists into tiles. Every grid has a static bound and programs without work end at once, so it can be
captured.
FP8 weights are multiplied in FP8, their activations quantised to one scale a token and 128 columns: the scheme that checkpoints
with a scale a block declare (`activation_scheme: dynamic`). Those with a scale a row declare one a token. They get the same,
as no group's scale is larger than its token's would be, so that nothing is rounded more coarsely; and a program that computes
128 columns of the intermediate quantises them without knowing the token's others. Plain weights are multiplied in the
activations' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.experts.triton_few import projections_refusal
from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable
from firstlight.quant import Packed, Weight

BLOCK = 128
"""Columns that share a scale, of activations and of weights in blocks."""


def when(call: Call) -> str | None:
    """bfloat16 or float16 activations; FP8 in blocks of 128 x 128 or with a scale a row, or plain weights of their dtype."""
    if reason := unavailable(call.hardware):
        return reason
    x, _, _, gate_up, down = call.args
    if isinstance(x, Packed) or x.dtype not in (torch.bfloat16, torch.float16):
        return f"the activations are {x.format if isinstance(x, Packed) else x.dtype}"
    if reason := projections_refusal(gate_up, down):
        return reason
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if isinstance(weight, Packed) and not weight.format.by_row and weight.format.block != (BLOCK, BLOCK):
            return f"{name} has a scale for {weight.format.block}, and this reads {BLOCK} x {BLOCK}"
        if isinstance(weight, Tensor) and weight.dtype != x.dtype:
            return f"{name} is {weight.dtype}, the activations {x.dtype}"
    size, hidden = down.shape[2], down.shape[1]
    if isinstance(down, Packed) and (size % BLOCK or hidden % BLOCK):
        return f"hidden size {hidden} and intermediate size {size} must be multiples of {BLOCK}"
    return None


def workspace(call: Call) -> int:
    """Lists of pairs, quantised tokens, and what lies between the products, bytes."""
    x, _, experts, gate_up, down = call.args
    return pair_bytes(x, gate_up, down.shape[2], experts.shape[1])


def pair_bytes(x: Tensor, gate_up: Weight, inner: int, slots: int) -> int:
    """The same for `slots` experts a token, the shared one included; inner: the largest intermediate size."""
    tokens, hidden = x.shape
    size = 1 if isinstance(gate_up, Packed) else x.element_size()
    scales = 4 if isinstance(gate_up, Packed) else 0
    between = tokens * slots * (hidden * x.element_size() + inner * size + scales * -(-inner // BLOCK))
    source = tokens * (hidden + scales * -(-hidden // BLOCK)) if isinstance(gate_up, Packed) else 0
    lists = 4 * gate_up.shape[0] * tokens + 12 * tokens * slots
    return between + source + lists


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, *, first_expert: int = 0) -> Tensor:
    """The contract of `experts`. Tolerance with FP8: 4 % of the result's RMS, from the activations' quantisation."""
    from firstlight.ops.experts import triton_grouped_kernels as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    return kernels.experts(x, weights.contiguous(), experts.contiguous(), gate_up, down, first_expert)
