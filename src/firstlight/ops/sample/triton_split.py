"""Drawing with the vocabulary split over programs: two launches, or four where a row may use top_k or top_p.

The noise is computed where it is needed, from the integers that `noise` defines: the same on every device. Nothing is sorted
and nothing read back, so it can be captured; a row's own settings decide what is done for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable


def when(call: Call) -> str | None:
    """Logits that are compared in float32."""
    if reason := unavailable(call.hardware):
        return reason
    return f"compares in float32, and the logits are {call.dtype}" if call.dtype == torch.float64 else None


CANDIDATES, MOST_PARTS = 4096, 256
"""Tokens of a row that are looked at closely, and parts of it."""


def workspace(call: Call) -> int:
    """Each row's candidates (logit, id, probability), counts of buckets, and what its parts found: bytes."""
    rows = call.args[0].shape[0]
    largest = 8 * MOST_PARTS
    return rows * (largest if call.kwargs.get("greedy") else largest + CANDIDATES * 16 + 1024 * 4 + 8 * MOST_PARTS)


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
    return kernels.sample(logits, temperature, top_k, top_p, seed, position, greedy, filtered)
