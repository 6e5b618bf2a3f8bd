"""How much of the floor's speed a kernel reaches: interpolated in log space from what was measured.

For a call of fixed static sizes, efficiency is a curve over one size of the step (tokens of a product, keys of a decode
attention, query length of a prefill attention). Every measured row pulls on it with a weight that falls with the fourth power
of its distance in octaves, so near rows decide and far ones only set the level: no row is ever taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from firstlight.hardware import GPUS, Hardware
from firstlight.hardware.calibration import Measured, all_tables
from firstlight.predict import constants
from firstlight.predict.floor import FAMILIES, Floor, Sizes
from firstlight.predict.shape import Numbers

GRID = np.exp2(np.arange(0, 27, 0.25))
"""Sizes at which curves are kept: four an octave, from 1 to 64 million."""
SOFTENING = 0.25
"""Octaves squared below which rows count as equally near."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Efficiency over GRID. origin: "interpolated", "transferred" or "datasheet". spread: standard deviation of ln(time)."""

    values: Numbers
    origin: str
    spread: float
    source: str
    includes: str = ""

    def at(self, size: Numbers) -> Numbers:
        """Efficiency at sizes, linear in their logarithm."""
        return np.interp(np.log2(np.maximum(size, 1.0)), np.log2(GRID), self.values)


@dataclass(frozen=True, slots=True)
class _Points:
    """A table's rows as points: log2 sizes [n, axes], efficiency [n]."""

    where: Numbers
    efficiency: Numbers


@lru_cache(maxsize=None)
def _points(index: int) -> _Points:
    table = all_tables()[index]
    family = FAMILIES[table.op, table.label]
    where, efficiency = [], []
    for sizes, seconds in table.rows:
        given = dict(zip(table.axes, sizes, strict=True))
        floor = family.floor(given, GPUS[table.gpu], table.format)
        where.append([math.log2(max(value, 1.0)) for value in family.place(given)])
        efficiency.append(min(floor / seconds, 1.0))
    return _Points(np.array(where), np.array(efficiency))


def _weights(points: Numbers, place: Numbers) -> Numbers:
    """Weights of the rows [n] at places [m, axes]: [m, n], each row summing to 1."""
    distance = ((place[:, None, :] - points[None, :, :]) ** 2).sum(-1)
    weight = 1.0 / (distance + SOFTENING) ** 2
    return weight / weight.sum(-1, keepdims=True)


def _interpolate(points: _Points, place: Numbers) -> Numbers:
    return np.exp(_weights(points.where, place) @ np.log(points.efficiency))


@lru_cache(maxsize=None)
def leave_one_out(index: int) -> Numbers:
    """ln(measured time / predicted time) of each row of a table, predicted from the rows of all other shapes."""
    points = _points(index)
    distance = ((points.where[:, None, :] - points.where[None, :, :]) ** 2).sum(-1)
    weight = np.where(distance < 1e-12, 0.0, 1.0 / (distance + SOFTENING) ** 2)
    predicted = (weight @ np.log(points.efficiency)) / np.maximum(weight.sum(-1), 1e-300)
    return predicted - np.log(points.efficiency)


@lru_cache(maxsize=None)
def spread_of(index: int) -> float:
    """Half of what holds the middle 80 % of a table's held-out errors, as a standard deviation."""
    low, high = np.quantile(leave_one_out(index), [0.1, 0.9])
    return float(high - low) / 2 / constants.QUANTILE_80


def _rank(table: Measured, hardware: Hardware, name: str, form: str) -> tuple[bool, bool, float, bool]:
    """Which table stands nearest: this GPU's, then the architecture's, then one of like balance, then the format's."""

    def balance(gpu: Hardware) -> float:
        return math.log(gpu.peak.get("bfloat16", 1.0) / max(gpu.bandwidth, 1.0))

    other = GPUS[table.gpu]
    return (
        table.gpu != name,
        other.architecture != hardware.architecture,
        round(abs(balance(other) - balance(hardware)), 2),
        table.format != form,
    )


def gpu_key(hardware: Hardware) -> str:
    """The name that tables use for a GPU, or "" if it isn't described."""
    return next((key for key, gpu in GPUS.items() if gpu.name == hardware.name), "")


def curve(op: str, label: str, hardware: Hardware, form: str, sizes: Mapping[str, int], default: float) -> Curve:
    """Efficiency of an op with these static sizes. default: what stands in where nothing was measured."""
    return _curve(op, label, hardware.name, form, tuple(sorted(sizes.items())), default, _Key(hardware))


class _Key:
    """A hardware description that hashes by what the choice of a table depends on."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.key = (hardware.name, hardware.architecture)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.key == self.key


@lru_cache(maxsize=4096)
def _curve(
    op: str, label: str, name: str, form: str, sizes: tuple[tuple[str, int], ...], default: float, key: _Key
) -> Curve:
    gpu = gpu_key(key.hardware)
    described = GPUS.get(gpu, key.hardware)
    fitting = [i for i, table in enumerate(all_tables()) if (table.op, table.label) == (op, label)]
    if not fitting:
        return Curve(np.full_like(GRID, default), "datasheet", constants.DATASHEET_SPREAD, "predict/constants.py")
    ranks = {i: _rank(all_tables()[i], described, gpu, form) for i in fitting}
    best = min(ranks.values())
    chosen = [i for i in fitting if ranks[i] == best]
    table = all_tables()[chosen[0]]
    family = FAMILIES[op, label]
    points = [_points(i) for i in chosen]
    joined = _Points(np.concatenate([p.where for p in points]), np.concatenate([p.efficiency for p in points]))
    places = np.array([[math.log2(max(v, 1.0)) for v in family.place({**dict(sizes), family.along: size})] for size in GRID])
    own = table.gpu == gpu and table.format == form
    spread = max(spread_of(i) for i in chosen)
    if not own:
        spread = math.hypot(spread, constants.TRANSFER_SPREAD)
    sources = ", ".join(f"{all_tables()[i].provider} on {all_tables()[i].gpu}" for i in chosen)
    origin = "interpolated" if own else "transferred"
    return Curve(_interpolate(joined, places), origin, spread, sources, table.includes)


__all__ = ["GRID", "Curve", "Floor", "Sizes", "curve", "gpu_key", "leave_one_out", "spread_of"]
