"""Speculative decoding: what a step that verifies drafts costs, and how many tokens it gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from firstlight.predict.shape import Numbers, StepShape
from firstlight.predict.step_time import StepModel


@dataclass(frozen=True, slots=True)
class Speculation:
    """drafts: tokens proposed a step. acceptance: chance that a draft is right when those before it were."""

    drafts: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.drafts < 1 or not 0 <= self.acceptance <= 1:
            raise ValueError(f"drafts {self.drafts} must be at least 1, acceptance {self.acceptance} between 0 and 1")

    @property
    def tokens(self) -> float:
        """Tokens that a step gives: one of its own, and each draft that it and all before it were right."""
        return float(sum(self.acceptance**i for i in range(self.drafts + 1)))


def decode_seconds(priced: StepModel, requests: int, context: float, speculation: Speculation | None = None) -> Numbers:
    """Seconds a token of each request. A draft costs a layer and the head, as multi-token-prediction layers do."""
    if speculation is None:
        return priced.time(StepShape.of_decode(requests, context)).seconds
    verify = priced.time(StepShape.of_decode(requests, context + speculation.drafts, 1 + speculation.drafts)).seconds
    return (verify + speculation.drafts * draft_seconds(priced, requests, context)) / speculation.tokens


def draft_seconds(priced: StepModel, requests: int, context: float) -> Numbers:
    """Seconds of one draft for every request: the mean layer, and what stands before and after the layers."""
    step = priced.time(StepShape.of_decode(requests, context))
    inside = np.sum([item.seconds for item in step.kernels if item.kernel.segment], axis=0)
    outside = np.sum([item.seconds for item in step.kernels if not item.kernel.segment], axis=0)
    return inside / priced.model.layers + outside
