"""Whether a provider gives the reference's answer, to what its numbers' precision allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""RMS error of a token over the RMS of all: some roundings of each dtype, and sums in another order."""
PACKED_TOLERANCE = 0.12
"""The same where weights are quantised: a provider may quantise activations as well, as the checkpoint's scheme declares."""
CHOOSING = frozenset({"moe", "route"})
"""Ops that pick experts: of near ties either is right, and a token with another expert has another answer."""
OTHER_CHOICE = 0.05
"""Share of tokens that may have made another choice (one at least), each within OTHER_ERROR."""
OTHER_ERROR = 0.9


def flatten(value: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flatten(item)]
    return []


def disagreement(
    op: str, actual: Sequence[Tensor], expected: Sequence[Tensor], precision: torch.dtype, packed: bool
) -> str | None:
    """What is wrong with `actual`, in a line for people, or None.

    precision: dtype of the activations. packed: whether the call read quantised weights.
    """
    tolerance = PACKED_TOLERANCE if packed else TOLERANCE.get(precision, TOLERANCE[torch.float32])
    if len(actual) != len(expected):
        return f"gives {len(actual)} tensors, the reference {len(expected)}"
    for one, other in zip(actual, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return (
                f"gives {tuple(one.shape)} in {one.dtype}, the reference {tuple(other.shape)} in {other.dtype}".replace(
                    "torch.", ""
                )
            )
        if other.numel() and (reason := _differs(op, one, other, tolerance)):
            return reason
    return None


def _differs(op: str, actual: Tensor, expected: Tensor, tolerance: float) -> str | None:
    rows = actual.reshape(actual.shape[0], -1) if actual.dim() else actual.reshape(1, 1)
    wanted = expected.reshape(rows.shape)
    allowed = max(1, int(OTHER_CHOICE * len(rows))) if op in CHOOSING else int(OTHER_CHOICE * len(rows))
    if not actual.is_floating_point():
        wrong = int((rows != wanted).any(-1).sum())
        return f"{wrong} of {len(rows)} tokens have other integers" if wrong > allowed else None
    wide = torch.float64 if actual.dtype == torch.float64 else torch.float32
    rows, wanted = rows.to(wide), wanted.to(wide)
    defined = torch.isfinite(wanted).all(-1)  # the rest is padding, of which nothing is asked
    rows, wanted = rows[defined], wanted[defined]
    if not len(rows):
        return "can't be judged: no row of the reference's answer is finite"
    if not bool(torch.isfinite(rows).all()):
        return "gives NaN or infinity where the reference doesn't"
    scale = wanted.square().mean().sqrt().clamp(min=1e-30)
    error = (rows - wanted).square().mean(-1).sqrt() / scale
    worst, beyond = float(error.max()), int((error > tolerance).sum())
    if not beyond or (op in CHOOSING and beyond <= allowed and worst <= OTHER_ERROR):
        return None
    return f"differs from the reference by {worst:.2g} of the answer's RMS (allowed: {tolerance:g})"
