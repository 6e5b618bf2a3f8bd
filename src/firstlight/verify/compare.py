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

    module: of a module or a layer on the reference's own inputs, worst row. whole: of the residual stream and the logits
    end to end, worst row. tie: a token's routing is a toss-up for a module if the logits of the last expert chosen and the
    first one left out differ by less, relative to the largest; where its input has come a longer way, by less than the
    tolerance there.
    """

    module: float
    whole: float
    tie: float


# float32 rounds at 6e-8; sums of a few thousand terms and the delta rule's triangular solves lose one to two digits.
# bfloat16 rounds at 4e-3 and float16 at 5e-4, several times in a module; errors add up over layers, and the worst of some
# hundred rows has several times the typical error. What they hide, a run in float32 shows.
TOLERANCES = {
    torch.float32: Tolerance(module=1e-5, whole=1e-4, tie=1e-5),
    torch.float16: Tolerance(module=2e-2, whole=1e-1, tie=2e-3),
    torch.bfloat16: Tolerance(module=1e-1, whole=3e-1, tie=1e-2),
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


def routing_gaps(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T] float32 on the CPU: how clear the choice of experts is: (k-th logit - the next one) / the largest magnitude.

    logits: [T, E] of the router. Infinite if every expert is chosen.
    """
    if top_k >= logits.shape[-1]:
        return torch.full((len(logits),), math.inf)
    best = logits.float().topk(top_k + 1, dim=-1).values
    scale = logits.float().abs().amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((best[:, -2] - best[:, -1]) / scale).cpu()
