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
SMALL = 1 / 32
"""Routing values count as at least so large. Experts are chosen by softmax, in float32: logits nearer than some 1e-7 become scores that
only rounding tells apart, however small all of them are."""


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


# float32 rounds at 6e-8; sums of a few thousand terms and the delta rule's triangular solves lose one to two digits, and where they
# cancel, a little more: one CPU's products brought a right mixer to 1.1e-5, another's to less than 1e-5.
# bfloat16 rounds at 4e-3 and float16 at 5e-4, several times in a module; errors add up over layers, and the worst of some
# hundred rows has several times the typical error: of twelve random models with Gated DeltaNet, whose gated norm divides by
# the length of what it gets, four had a row beyond 0.1 in bfloat16, the worst 0.131. What they hide, a run in float32 shows.
TOLERANCES = {
    torch.float32: Tolerance(module=2e-5, whole=1e-4, tie=1e-5),
    torch.float16: Tolerance(module=2e-2, whole=1e-1, tie=2e-3),
    torch.bfloat16: Tolerance(module=2e-1, whole=3e-1, tie=1e-2),
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


def routing_gaps(choice: torch.Tensor, top_k: int, groups: int = 1, top_groups: int = 1) -> torch.Tensor:
    """[T] float32 on the CPU: how clear the choice of experts is.

    choice: [T, E], what experts are chosen by: router logits, or scores with a bias. The gap is between the last chosen
    value and the first left out, relative to the largest magnitude, but to `SMALL` at least; with groups (see the op `route`) the smaller of that
    between groups and that between experts. Infinite where nothing is left out.
    """
    choice = choice.float()
    gap = torch.full((len(choice),), math.inf, device=choice.device)
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        value = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        gap = _gap(value, top_groups)
        kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, value.topk(top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    return gap.minimum(_gap(choice, top_k)).cpu()


def _gap(values: torch.Tensor, count: int) -> torch.Tensor:
    """[T]: (count-th largest - the next) / the largest magnitude or `SMALL`, infinite if there is no next."""
    if count >= values.shape[-1]:
        return torch.full((len(values),), math.inf, device=values.device)
    best = values.topk(count + 1, dim=-1).values
    scale = values.masked_fill(values.isinf(), 0).abs().amax(dim=-1).clamp(min=SMALL)
    return (best[:, -2] - best[:, -1]) / scale
