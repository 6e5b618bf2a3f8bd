"""Kernels as our own providers do them here: efficiencies from a table that `firstlight calibrate` wrote.

Such a table has times of whole calls, by provider, at shapes in logarithmic paces. A call takes a start, what its quickest
row takes beyond its floor, and then its floor over an efficiency that is interpolated between the rows: each pulls with a
weight that falls with the sixth power of its distance in octaves of tokens, rows and context. Only rows of the very
provider, sizes and format count: nothing is transferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from firstlight.hardware.calibration import Measured, Table
from firstlight.ops.sizes import Sizes
from firstlight.predict import constants
from firstlight.predict.efficiency import SOFTENING
from firstlight.predict.shape import Numbers, StepShape

FloorOf = Callable[[StepShape], Numbers]
"""Least seconds of a kernel at step shapes."""


@dataclass(frozen=True)
class CalibratedKernel:
    """A provider's rows for one kernel. where: log2 of (tokens, rows, context) [n, 3]; floor, seconds: [n]."""

    provider: str
    gpu: str
    where: Numbers
    floor: Numbers
    measured: Numbers

    @cached_property
    def start(self) -> float:
        """Seconds that a call takes before its floor counts."""
        return float(np.min(self.measured - np.minimum(self.floor, self.measured)))

    @cached_property
    def _logarithms(self) -> Numbers:
        """ln(efficiency) of each row."""
        work = np.maximum(self.measured - self.start, self.floor)
        efficiency: Numbers = np.log(np.minimum(self.floor / np.maximum(work, 1e-12), 1.0))
        return efficiency

    def seconds(self, shape: StepShape, label: str, floor: Numbers) -> Numbers:
        """Seconds of a call in each step of `shape`, of which `floor` are its least."""
        return np.where(floor > 0, self._at(place(shape, label), floor), 0.0)

    def _at(self, where: Numbers, floor: Numbers, without: Numbers | None = None) -> Numbers:
        inside = np.clip(where, self.where.min(0), self.where.max(0))
        distance = ((inside[:, None, :] - self.where[None, :, :]) ** 2).sum(-1)
        weight = 1.0 / (distance + SOFTENING) ** 3
        if without is not None:
            weight = np.where(without, 0.0, weight)
        logarithm = (weight @ self._logarithms) / weight.sum(-1)
        return self.start + floor / np.exp(logarithm)

    @cached_property
    def spread(self) -> float:
        """Standard deviation of ln(time): what holds 80 % of the rows, each predicted from the others."""
        if len(self.measured) < 3:
            return constants.TRANSFER_SPREAD
        found = self._at(self.where, self.floor, without=np.eye(len(self.measured), dtype=bool))
        return float(np.quantile(np.abs(np.log(found / self.measured)), 0.8)) / constants.QUANTILE_80


def place(shape: StepShape, label: str) -> Numbers:
    """Where steps stand among the rows: log2 of (tokens, rows, context of a row), [steps, 3]."""
    part = shape.part(label)
    tokens = shape.logits if label == "logits" else part.tokens
    rows = np.maximum(part.requests, 1.0)
    sizes = [tokens, rows, part.keys / rows] if label in ("decode", "prefill") else [tokens, 1.0, 1.0]
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, np.float64)) for size in sizes))
    found: Numbers = np.log2(np.maximum(np.stack(columns, -1), 1.0))
    return found


def find(table: Table, op: str, label: str, provider: str, sizes: Sizes) -> list[Measured]:
    """The groups of a table that have this very call."""
    return [
        group
        for group in table.groups
        if (group.op, group.label, group.provider) == (op, label, provider)
        and group.format == sizes.format
        and group.dtype in ("", sizes.dtype)
        and group.rows
        and _fixed(group) == {name: float(size) for name, size in sizes.fixed.items()}
    ]


STEP_AXES = ("tokens", "requests", "query", "context")


def _fixed(group: Measured) -> Mapping[str, float]:
    first = group.rows[0][0]
    return {name: size for name, size in zip(group.axes, first, strict=True) if name not in STEP_AXES}


def calibrated_kernel(groups: Sequence[Measured], label: str, floor_of: FloorOf) -> CalibratedKernel | None:
    """Of all rows of `groups`, which are one provider's; None without any."""
    rows = [
        (dict(zip(group.axes, sizes, strict=True)), seconds, group.gpu)
        for group in groups
        for sizes, seconds in group.rows
    ]
    if not rows:
        return None
    shape = shape_of([sizes for sizes, _, _ in rows], label)
    seconds = np.array([measured for _, measured, _ in rows])
    return CalibratedKernel(groups[0].provider, rows[0][2], place(shape, label), floor_of(shape), seconds)


def shape_of(rows: Sequence[Mapping[str, float]], label: str) -> StepShape:
    """Steps that make the calls of these rows. Ops that see all rows alike have tokens alone: decode rows stand for them."""
    tokens = np.array([sizes["tokens"] for sizes in rows])
    if label not in ("decode", "prefill"):
        return StepShape.of_decode(tokens, 1)
    requests = np.array([sizes.get("requests", sizes["tokens"]) for sizes in rows])
    query = tokens / requests
    context = np.array([sizes.get("context", sizes.get("query", 1.0)) for sizes in rows])
    if label == "decode":
        return StepShape.of_decode(requests, np.maximum(context, query), query)
    return StepShape.of_prefill(requests, query, np.maximum(context - query, 0.0))
