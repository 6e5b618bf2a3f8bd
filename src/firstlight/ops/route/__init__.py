"""Choosing the experts of each token, and how much each counts."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.precision import wide_dtype
from firstlight.ops.route import triton_fused

SCORINGS = ("softmax", "sigmoid")


def body(
    logits: Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalise: bool,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    live: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The top_k experts of each token by score, best first, and their weights.

    logits: [T, E]. scores = softmax over all E experts, or sigmoid of each; in float32 (float64 if logits are).
    choice = scores + bias ([E]) where a bias is given: it steers the choice and never enters the weights.
    groups > 1: experts are cut into `groups` equal runs, a group counts as the sum of its two best choices, and only
      experts of the `top_groups` best groups can be chosen.
    weights = scores of the chosen, divided by their sum (+ 1e-20) if `renormalise`, times `scale`.
    Among equals the lower index wins. live: [1] int on the device; tokens from live[0] on are padding: expert -1, weight 0.
    Returns (weights [T, top_k] in `dtype`, by default logits.dtype, cast once; experts [T, top_k] int32).
    Raises ValueError for another scoring, or counts that don't fit.
    Source: Qwen3-MoE's router (softmax); DeepSeek-V3 (arXiv 2412.19437), equations 13 to 16 (sigmoid, bias, groups).
    """
    check_arguments(logits.shape[1], top_k, scoring, groups, top_groups)
    wide = logits.to(wide_dtype(logits.dtype))
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        value = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, best(value, top_groups), True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    experts = best(choice, top_k)
    weights = scores.gather(1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * scale
    if live is not None:
        padding = (torch.arange(len(logits), device=logits.device) >= live).unsqueeze(1)
        experts, weights = experts.masked_fill(padding, -1), weights.masked_fill(padding, 0)
    return weights.to(dtype or logits.dtype), experts.int()


def best(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row, largest first, the lower index first among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def check_arguments(experts: int, top_k: int, scoring: str, groups: int, top_groups: int) -> None:
    """Raise ValueError where the static arguments contradict each other."""
    if scoring not in SCORINGS:
        raise ValueError(f"route: scoring {scoring!r} is unknown; legal values: {', '.join(map(repr, SCORINGS))}")
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(
            f"route: {experts} experts in {groups} groups, {top_groups} of them kept: "
            f"groups must divide the experts, and between 1 and {groups} groups can be kept"
        )
    if not 1 <= top_k <= top_groups * (experts // groups):
        raise ValueError(
            f"route: top_k={top_k} must be between 1 and the {top_groups * (experts // groups)} experts to choose from"
        )


def abstract(
    logits: Tensor, *, top_k: int, dtype: torch.dtype | None = None, **kwargs: object
) -> tuple[Tensor, Tensor]:
    """[T, top_k] weights and int32 experts."""
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=dtype or logits.dtype), logits.new_empty(shape, dtype=torch.int32)


def cost(shape: Shape, logits: Tensor, *, top_k: int, dtype: torch.dtype | None = None, **kwargs: object) -> Cost:
    """Logits once in; weights and experts once out."""
    experts = logits.shape[1]
    return Cost(
        flops={"float32": shape.tokens * experts * 8},
        read=shape.tokens * experts * logits.element_size(),
        written=shape.tokens * top_k * ((dtype or logits.dtype).itemsize + 4),
    )


route = Op("route", body, abstract=abstract, cost=cost)
route.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2)
