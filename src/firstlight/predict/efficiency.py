"""How much of the floor's speed a kernel reaches: interpolated in log space from what was measured.

A kernel takes a start, then its floor over an efficiency. For a call of fixed static sizes, efficiency is a curve over one
size of the step (tokens of a product, keys of a decode attention, query length of a prefill attention). Every measured row of
the op pulls on it with a weight that falls with the sixth power of its distance in octaves. Rows of other formats and GPUs
count too, from farther off. So near rows decide, far ones set the level, and no row is ever taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np

from firstlight.hardware import GPUS, Hardware
from firstlight.hardware.calibration import all_tables
from firstlight.predict import constants
from firstlight.predict.floor import FAMILIES
from firstlight.predict.shape import Numbers

GRID = np.exp2(np.arange(0, 27, 0.25))
"""Sizes at which curves are kept: four an octave, from 1 to 64 million."""
SOFTENING = 0.25
"""Octaves squared below which rows count as equally near."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Efficiency over GRID.

    tables: indices of the tables behind it, and `pull` their weights [tables, GRID]; none where nothing was measured. own:
    weight of rows of this very GPU and format, over GRID. op, label: of the tables. includes: work that most rows were timed
    with.
    """

    values: Numbers
    tables: tuple[int, ...] = ()
    pull: Numbers = field(default_factory=lambda: np.zeros((0, len(GRID))))
    own: Numbers = field(default_factory=lambda: np.zeros(len(GRID)))
    op: str = ""
    label: str = ""
    includes: str = ""

    def at(self, size: Numbers) -> Numbers:
        """Efficiency at sizes: between points of the grid, its logarithm is linear in the size's."""
        return np.exp(np.interp(np.log2(np.maximum(size, 1.0)), np.log2(GRID), np.log(self.values)))

    def trust(self, size: Numbers) -> tuple[str, float, str]:
        """(origin, spread, source) at sizes.

        origin: "interpolated" from this GPU's rows, "transferred" from others', or "datasheet". spread: standard deviation of
        ln(time). source: what pulls most.
        """
        if not self.tables:
            return "datasheet", constants.DATASHEET_SPREAD, "constants.py"
        place = int(np.clip(round(4 * math.log2(max(float(np.mean(size)), 1.0))), 0, len(GRID) - 1))
        nearest = self.tables[int(np.argmax(self.pull[:, place]))]
        spread, about = spread_of(self.op, self.label, nearest), all_tables()[nearest]
        source = f"{about.provider} on {about.gpu}"
        if self.own[place] >= 0.5:
            return "interpolated", spread, source
        return "transferred", math.hypot(spread, constants.TRANSFER_SPREAD), source


@dataclass(frozen=True, slots=True)
class Points:
    """All rows of an op, of all tables. where: log2 of sizes [n, axes]; table: which it is from; floor, seconds: [n]."""

    where: Numbers
    table: Numbers
    floor: Numbers
    seconds: Numbers
    efficiency: Numbers


@cache
def points_of(op: str, label: str) -> Points | None:
    """The measured rows of an op, or None."""
    family = FAMILIES.get((op, label))
    where, origin, floors, seconds = [], [], [], []
    for i, table in enumerate(all_tables()):
        if family is None or (table.op, table.label) != (op, label):
            continue
        for sizes, measured in table.rows:
            given = dict(zip(table.axes, sizes, strict=True))
            where.append(_log(family.place(given)))
            floors.append(family.floor(given, GPUS[table.gpu], table.format))
            seconds.append(measured)
            origin.append(i)
    if family is None or not where:
        return None
    floor, time = np.array(floors), np.array(seconds)
    efficiency = np.minimum(floor / np.maximum(time - constants.HEAVY_START[family.kind], floor), 1.0)
    return Points(np.array(where), np.array(origin), floor, time, efficiency)


def _log(place: tuple[float, ...]) -> list[float]:
    return [math.log2(max(value, 2.0**-10)) for value in place]


def _apart(table: int, gpu: str, form: str, hardware: Hardware) -> float:
    """How far a table's rows stand from a call, whatever their sizes: octaves squared."""
    other = all_tables()[table]
    distance = constants.OTHER_FORMAT if other.format != form else 0.0
    if other.gpu == gpu:
        return distance
    distance += constants.OTHER_GPU + (_balance(GPUS[other.gpu]) - _balance(hardware)) ** 2
    return distance + (constants.OTHER_ARCHITECTURE if GPUS[other.gpu].architecture != hardware.architecture else 0.0)


def _balance(hardware: Hardware) -> float:
    return math.log2(hardware.peak.get("bfloat16", 1.0) / max(hardware.bandwidth, 1.0))


def _weights(points: Points, places: Numbers, apart: Numbers) -> Numbers:
    """Weights of the rows [n] at places [m, axes]: [m, n], each row summing to 1."""
    inside = np.clip(places, points.where.min(0), points.where.max(0))
    distance = ((inside[:, None, :] - points.where[None, :, :]) ** 2).sum(-1) + apart
    weight = 1.0 / (distance + SOFTENING) ** 3
    return weight / weight.sum(-1, keepdims=True)


@cache
def held_out(op: str, label: str, table: int) -> Numbers:
    """ln(predicted / measured time) of each row of a table, predicted from the rows of all other shapes."""
    points = points_of(op, label)
    assert points is not None
    about = all_tables()[table]
    gpu = GPUS[about.gpu]
    apart = np.array([_apart(int(i), about.gpu, about.format, gpu) for i in points.table])
    rows = np.flatnonzero(points.table == table)
    distance = ((points.where[rows][:, None, :] - points.where[None, :, :]) ** 2).sum(-1)
    weight = 1.0 / (distance + apart + SOFTENING) ** 3
    weight[(distance < 1e-12) & (points.table == table)] = 0.0
    efficiency = np.exp(weight @ np.log(points.efficiency) / weight.sum(-1))
    start = constants.HEAVY_START[FAMILIES[op, label].kind]
    return np.log((start + points.floor[rows] / efficiency) / points.seconds[rows])


@cache
def spread_of(op: str, label: str, table: int) -> float:
    """What holds the middle 80 % of a table's held-out errors, as a standard deviation."""
    reach = np.quantile(np.abs(held_out(op, label, table)), 0.8)
    return float(reach) / constants.QUANTILE_80


def gpu_key(hardware: Hardware) -> str:
    """The name that tables use for a GPU, or "" if it isn't described."""
    return next((key for key, gpu in GPUS.items() if gpu.name == hardware.name), "")


def curve(op: str, label: str, hardware: Hardware, form: str, sizes: Mapping[str, float], default: float) -> Curve:
    """Efficiency of an op with these static sizes. default: what stands in where nothing was measured."""
    gpu = gpu_key(hardware)
    described = GPUS.get(gpu, hardware)  # a "what if" with other peaks has the efficiencies of the real one
    balance = (described.architecture, _balance(described))
    return _curve(op, label, gpu, form, tuple(sorted(sizes.items())), default, balance)


@lru_cache(maxsize=4096)
def _curve(
    op: str,
    label: str,
    gpu: str,
    form: str,
    sizes: tuple[tuple[str, float], ...],
    default: float,
    balance: tuple[str, float],
) -> Curve:
    points = points_of(op, label)
    if points is None:
        return flat(default)
    family = FAMILIES[op, label]
    like = Hardware("", "", balance[0], peak={"bfloat16": 2.0 ** balance[1]}, bandwidth=1.0)
    tables = {int(i) for i in points.table}
    apart = {i: _apart(i, gpu, form, like) for i in tables}
    places = np.array([_log(family.place({**dict(sizes), family.along: size})) for size in GRID])
    weights = _weights(points, places, np.array([apart[int(i)] for i in points.table]))
    values = np.exp(weights @ np.log(points.efficiency))
    if family.kind in ("attention", "state"):  # their work grows with the size, and more of it never takes less time
        values = GRID / np.maximum.accumulate(GRID / values)
    order = tuple(sorted(tables))
    pull = np.array([weights[:, points.table == i].sum(-1) for i in order])
    own = sum((pull[n] for n, i in enumerate(order) if apart[i] == 0.0), np.zeros(len(GRID)))
    about = all_tables()[order[int(np.argmax(pull.sum(-1)))]]
    return Curve(values, order, pull, own, op, label, about.includes)


def flat(efficiency: float) -> Curve:
    """A constant with no measured row behind it."""
    return Curve(np.full_like(GRID, efficiency))
