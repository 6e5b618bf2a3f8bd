"""Products that no kernel serves on a GPU: said once, at start, as the reference takes many times as long."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from firstlight.hardware import Hardware
from firstlight.ops.binding import Choice
from firstlight.ops.op import PRODUCTS, REFERENCE, across_layers, sites

logger = logging.getLogger(__name__)


def warn_of_references(model: torch.nn.Module, hardware: Hardware) -> None:
    """Log a warning for each op of `PRODUCTS` that the reference serves somewhere. model: bound. Nothing on a CPU."""
    if hardware.kind == "cpu":
        return
    for op in PRODUCTS:
        found = dict(_references(model, op))
        if found:
            places = sorted({across_layers(path) for path in found})
            choice = next(iter(found.values()))
            reasons = "; ".join(f"{provider}: {reason}" for provider, reason in choice.refused)
            logger.warning(
                "%s at %s: no kernel serves it in some or all steps, and the reference is slow (%s). See firstlight ops.",
                op, ", ".join(places), reasons,
            )  # fmt: skip


def _references(model: torch.nn.Module, op: str) -> Iterator[tuple[str, Choice]]:
    """Sites where the reference computes an op in a bucket, alone or as a part of another, with that choice."""
    for path, site in sites(model):
        for choice in site.choices:
            for _, part in choice.with_parts():
                if part.op == op and part.provider == REFERENCE:
                    yield path, part
