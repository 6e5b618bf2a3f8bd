"""Drawing without top-k and top-p: the vocabulary is split over programs, each keeps its largest, a second launch picks.

The noise is computed where it is needed, from the integers that `noise` defines: the same on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable


def when(call: Call) -> str | None:
    """Greedy, or promised to be without top-k and top-p."""
    if reason := unavailable(call.hardware):
        return reason
    if call.kwargs.get("filtered", True) and not call.kwargs.get("greedy", False):
        return "knows no top-k and top-p"
    return f"compares in float32, and the logits are {call.dtype}" if call.dtype == torch.float64 else None


def run(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    greedy: bool = False,
    filtered: bool = True,
) -> Tensor:
    """The contract of `sample`. Near ties may fall otherwise: the logarithms differ in their last bits."""
    from firstlight.ops.sample import triton_split_kernels as kernels

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return kernels.sample(logits, temperature, seed, position, greedy)
