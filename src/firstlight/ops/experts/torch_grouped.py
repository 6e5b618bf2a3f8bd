"""All experts in two launches: torch's grouped matrix product over tokens sorted by expert.

The rows of each expert stay on the device, so the launches depend on shapes alone and can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from firstlight.ops.experts.assignment import sort_by_expert, weighted_sum
from firstlight.ops.op import Call
from firstlight.quant import Packed, Weight


def when(call: Call) -> str | None:
    """bfloat16 on a GPU that torch's grouped product serves."""
    x, gate_up, down = call.args[0], call.args[3], call.args[4]
    if call.hardware.kind != "cuda":
        return "serves CUDA only"
    if isinstance(gate_up, Packed) or isinstance(down, Packed):
        return "reads plain weights only"
    if {x.dtype, gate_up.dtype, down.dtype} != {torch.bfloat16}:
        return f"serves bfloat16 only, not {x.dtype}"
    if gate_up.shape[2] % 8 or down.shape[2] % 8:
        return f"hidden size {gate_up.shape[2]} and intermediate size {down.shape[2]} must be multiples of 8"
    return None


def workspace(call: Call) -> int:
    """Rows and results of all pairs, in the activations' dtype and widened for the sum, and the numbers they are sorted by."""
    x, _, experts, _, down = call.args
    pairs, size = experts.numel(), x.element_size()
    return pairs * (x.shape[1] * (4 * size + 8) + 4 * down.shape[2] * size + 64)


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, *, first_expert: int = 0) -> Tensor:
    """The contract of `experts`."""
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    assignment = sort_by_expert(experts, gate_up.shape[0], first_expert)
    ends = assignment.rows.cumsum(0).int()
    rows = x[assignment.order // experts.shape[1]]
    gate, up = grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    hidden = grouped_mm(silu(gate) * up, down.transpose(1, 2), offs=ends)
    # Rows past the last expert's are never written: they may hold anything, so they are replaced.
    served = torch.arange(len(hidden), device=x.device) < ends[-1]
    result = torch.empty_like(hidden)
    result[assignment.order] = torch.where(served.unsqueeze(1), hidden, 0)
    return weighted_sum(result, weights, assignment)
