"""How far apart two answers are, and how far they may be.

The measure is the relative error of the worst row: for each token |ours - reference| / |reference| over its vector. A mean
over a tensor would hide one bad row. Vectors much shorter than the others count as if they were longer, because their
digits have been cancelled away. A NaN or infinity on either side is an infinite error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SHORT = 1e-2
"""A row counts as at least this share of the rows' root mean square length."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest allowed relative errors.

    module: of a module on the reference's own inputs, worst row. whole: of the residual stream and the logits end to end,
    worst row. tie: experts whose router logits are closer than this (relative to the largest) may be chosen either way.
    """

    module: float
    whole: float
    tie: float


# float32 rounds at 6e-8; sums of a few thousand terms and the delta rule's triangular solves lose one to two digits.
# bfloat16 rounds at 4e-3 and float16 at 5e-4, several times in a module; errors add up over layers.
TOLERANCES = {
    torch.float64: Tolerance(module=2e-5, whole=1e-4, tie=1e-5),
    torch.float32: Tolerance(module=2e-5, whole=1e-4, tie=1e-5),
    torch.float16: Tolerance(module=1e-2, whole=5e-2, tie=4e-3),
    torch.bfloat16: Tolerance(module=5e-2, whole=2e-1, tie=3e-2),
}


def row_errors(ours: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[T] float64 on the CPU: the relative error of each row of two [T, N] tensors; infinite where one isn't finite.

    Raises ValueError if the shapes differ.
    """
    if ours.shape != reference.shape:
        raise ValueError(f"shapes differ: ours {list(ours.shape)}, the reference's {list(reference.shape)}")
    ours, reference = ours.double(), reference.double()
    length = reference.norm(dim=-1)
    floor = SHORT * length.square().mean().sqrt()
    error = (ours - reference).norm(dim=-1) / length.maximum(floor).clamp(min=torch.finfo(torch.float32).tiny)
    return error.nan_to_num(nan=math.inf, posinf=math.inf).cpu()


def ties(logits: torch.Tensor, top_k: int, margin: float) -> torch.Tensor:
    """[T] bool: tokens whose k-th and next expert are too close to call. logits: [T, E] of the router."""
    if top_k >= logits.shape[-1]:
        return torch.zeros(len(logits), dtype=torch.bool)
    best = logits.float().topk(top_k + 1, dim=-1).values
    gap = best[:, -2] - best[:, -1]
    return (gap <= margin * logits.float().abs().amax(dim=-1)).cpu()
