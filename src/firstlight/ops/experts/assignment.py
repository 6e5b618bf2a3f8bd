"""Assignments of tokens to experts, in the order of the experts, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.ops.precision import wide_dtype


@dataclass(frozen=True, slots=True)
class Assignment:
    """The T * k pairs (token, expert), token-major, sorted by expert.

    order: [T * k], the pairs by expert; those that no local expert serves come last. rows: [E], pairs of each expert.
    local: [T, k] bool, whether a local expert serves the pair.
    """

    order: Tensor
    rows: Tensor
    local: Tensor


def sort_by_expert(experts: Tensor, count: int, first_expert: int) -> Assignment:
    """Sort [T, k] expert numbers; `count` experts from `first_expert` on are local. Launches don't depend on data."""
    number = experts.long() - first_expert
    local = (number >= 0) & (number < count)
    number = torch.where(local, number, count).flatten()
    ordered, order = number.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(count + 1, device=number.device))
    return Assignment(order, bounds[1:] - bounds[:-1], local)


def weighted_sum(result: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
    """[T * k, H] results of the pairs, token-major -> [T, H], summed in float32 in the order of the choice."""
    dtype = wide_dtype(result.dtype)
    share = torch.where(assignment.local, weights.to(dtype), 0).unsqueeze(-1)
    return (result.view(*weights.shape, -1).to(dtype) * share).sum(1).to(result.dtype)
