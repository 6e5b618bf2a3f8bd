"""How much of the floor's speed a kernel reaches: interpolated in log space from what was measured.

A kernel takes a start, then its floor over an efficiency. For a call of fixed static sizes, efficiency is a curve over one
or two sizes of the step (tokens of a product, keys of a decode attention, tokens and query of a prefill's). In each table of the
op, every row pulls on it with a weight that falls with the sixth power of its distance in octaves; tables pull on one another
in the same way, by their nearest row and by how far their format and GPU are from the call's. So near rows decide, far ones
set the level, and no row is ever taken as it is. Floors count with the matrix rate that the GPU sustains (see `sustained`), so
that what is carried to another GPU is how well a kernel is made, not how much of its peak the GPU can keep up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from firstlight.hardware import GPUS, Hardware
from firstlight.hardware.calibration import Measured, all_tables
from firstlight.ops.op import REGISTRY
from firstlight.ops.sizes import element
from firstlight.predict import constants
from firstlight.predict.floor import FAMILIES, product_rate
from firstlight.predict.shape import Numbers

GRID = np.exp2(np.arange(-10, 27, 0.25))
"""Sizes at which curves are kept: four an octave, from a thousandth (rows of an expert, on average) to 64 million."""
ACROSS = np.exp2(np.arange(4, 18.0))
"""Sizes of the second kind at which they are kept."""
SOFTENING = 0.25
"""Octaves squared below which rows count as equally near."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Efficiency over GRID [G], or over ACROSS and GRID [A, G].

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

    def at(self, size: Numbers, across: Numbers | None = None) -> Numbers:
        """Efficiency at sizes: between points of the grids, its logarithm is linear in theirs. across: of the second kind."""
        place = np.log2(np.maximum(size, GRID[0]))
        if self.values.ndim == 1:
            return np.exp(np.interp(place, np.log2(GRID), np.log(self.values)))
        assert across is not None
        lines = np.log(self.values)
        second = np.clip(np.log2(np.maximum(across, 1.0)) - np.log2(ACROSS[0]), 0.0, len(ACROSS) - 1.0)
        below = np.minimum(second.astype(int), len(ACROSS) - 2)
        first = np.clip((place - np.log2(GRID[0])) * 4, 0.0, len(GRID) - 1.0)
        left = np.minimum(first.astype(int), len(GRID) - 2)
        right, upper = first - left, second - below
        low = lines[below, left] * (1 - right) + lines[below, left + 1] * right
        high = lines[below + 1, left] * (1 - right) + lines[below + 1, left + 1] * right
        return np.exp(low * (1 - upper) + high * upper)

    def trust(self, size: Numbers) -> tuple[str, float, str]:
        """(origin, spread, source) at sizes.

        origin: "interpolated" from this GPU's rows, "transferred" from others', or "datasheet". spread: standard deviation of
        ln(time). source: what pulls most.
        """
        if not self.tables:
            return "datasheet", constants.DATASHEET_SPREAD, "constants.py"
        place = min(int(np.searchsorted(GRID, float(np.mean(size)))), len(GRID) - 1)
        nearest = self.tables[int(np.argmax(self.pull[:, place]))]
        spread, about = spread_of(self.op, self.label, nearest), all_tables()[nearest]
        source = f"{about.provider} on {about.gpu}"
        if self.own[place] >= 0.5:
            return "interpolated", spread, source
        return "transferred", math.hypot(spread, constants.TRANSFER_SPREAD), source


def flat(efficiency: float) -> Curve:
    """A constant with no measured row behind it."""
    return Curve(np.full_like(GRID, efficiency))


@dataclass(frozen=True, slots=True)
class Points:
    """The rows of one table. where: log2 of sizes [n, axes]; floor, seconds, efficiency: [n]."""

    where: Numbers
    floor: Numbers
    seconds: Numbers
    efficiency: Numbers


@cache
def tables_of(op: str, label: str) -> tuple[int, ...]:
    """Indices of the tables of an op. Of other engines' kernels only: ours say nothing of theirs."""
    if (op, label) not in FAMILIES:
        return ()
    return tuple(
        i for i, table in enumerate(all_tables()) if (table.op, table.label) == (op, label) and not is_own(table)
    )


def is_own(table: Measured) -> bool:
    """Whether a table has one of our providers."""
    return table.op in REGISTRY and table.provider in REGISTRY[table.op].providers


@cache
def points_of(index: int) -> Points:
    """The rows of a table."""
    table = all_tables()[index]
    family = FAMILIES[table.op, table.label]
    given, time = columns_of(table)
    floor = family.floor(given, sustained(GPUS[table.gpu]), element(table.format))
    efficiency = np.minimum(floor / np.maximum(time - constants.HEAVY_START[family.kind], floor), 1.0)
    return Points(_log(family.place(given)), floor, time, efficiency)


def columns_of(table: Measured) -> tuple[Mapping[str, Numbers], Numbers]:
    """Sizes by axis, and seconds, of all rows of a table."""
    columns = np.array([sizes for sizes, _ in table.rows]).T
    return dict(zip(table.axes, columns, strict=True)), np.array([seconds for _, seconds in table.rows])


def _log(place: tuple[Any, ...]) -> Numbers:
    """log2 of sizes, [n, axes]."""
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, np.float64)) for size in place))
    found: Numbers = np.log2(np.maximum(np.stack(columns, -1), 2.0**-10))
    return found


def sustained(hardware: Hardware) -> Hardware:
    """The same GPU with the matrix rates that it keeps up, in place of its peaks.

    What power and clocks allow differs between GPUs far more than how well kernels are made: large products reach 0.92 of an
    H20's peak, 0.7 of an H200's, 0.5 of an MI300X's. The share is that of the GPU's own large products, where a table has
    them, else of those nearest to it in format, architecture and balance.
    """
    described = GPUS.get(gpu_key(hardware), hardware)
    peaks = {dtype: rate * _share(_key(described), dtype) for dtype, rate in hardware.peak.items()}
    return replace(hardware, peak=peaks)


Key = tuple[str, str, float]
"""What matters of a GPU to tables: its name in them, architecture, balance of operations to bytes (octaves)."""


def _key(hardware: Hardware) -> Key:
    return gpu_key(hardware), hardware.architecture, _balance(hardware)


@cache
def _share(gpu: Key, dtype: str) -> float:
    """Share of the peak in `dtype` that large products sustain on a GPU."""
    shares = {i: share for i in tables_of("linear", "") if (share := _table_share(i))}
    if not shares:
        return constants.MATRIX_PEAK
    return shares[min(shares, key=lambda i: _apart(i, gpu, dtype))]


@cache
def _table_share(index: int) -> float:
    """Share of its peak that a table's large products reach; 0.0 if it has none."""
    table = all_tables()[index]
    peak = GPUS[table.gpu].peak.get(element(table.format), 0.0)
    given, seconds = columns_of(table)
    rates = product_rate(given, seconds)[np.prod(list(given.values()), axis=0) >= constants.LARGE_PRODUCT]
    return min(float(np.quantile(rates, 0.9)) / peak, 1.0) if rates.size and peak else 0.0


def _apart(table: int, gpu: Key, form: str) -> float:
    """How far a table's rows stand from a call, whatever their sizes: octaves squared."""
    other = all_tables()[table]
    distance = constants.OTHER_FORMAT if other.format != form else 0.0
    name, architecture, balance = gpu
    if other.gpu == name:
        return distance
    distance += constants.OTHER_GPU + (_balance(GPUS[other.gpu]) - balance) ** 2
    return distance + (constants.OTHER_ARCHITECTURE if GPUS[other.gpu].architecture != architecture else 0.0)


def _balance(hardware: Hardware) -> float:
    return math.log2(hardware.peak.get("bfloat16", 1.0) / max(hardware.bandwidth, 1.0))


def _pulled(
    order: Sequence[int], places: Numbers, gpu: Key, form: str, without: int | None = None
) -> tuple[Numbers, Numbers]:
    """ln(efficiency) at places [m, axes]: [m], and the pull of each table [tables, m].

    order: the tables. without: one of them whose rows at the very place are left out.
    """
    found = {i: points_of(i) for i in order}
    low = np.min([points.where.min(0) for points in found.values()], axis=0)
    high = np.max([points.where.max(0) for points in found.values()], axis=0)
    inside = np.clip(places, low, high)
    values, pulls = [], []
    for i, points in found.items():
        distance = _squares(inside, points.where)
        if i == without:
            distance = np.where(distance < 1e-9, np.inf, distance)
        soft = distance + SOFTENING
        weight = 1.0 / (soft * soft * soft)
        total = weight.sum(-1)
        values.append(weight @ np.log(points.efficiency) / np.where(total > 0, total, 1.0))
        pulls.append(1.0 / (distance.min(-1) + _apart(i, gpu, form) + SOFTENING) ** 3)
    pull = np.array(pulls) / np.sum(pulls, axis=0)
    return (np.array(values) * pull).sum(0), pull


def _squares(a: Numbers, b: Numbers) -> Numbers:
    """Squared distances between rows of a [m, axes] and of b [n, axes], [m, n]."""
    found: Numbers = (a * a).sum(-1)[:, None] + (b * b).sum(-1)[None, :] - 2.0 * (a @ b.T)
    return np.maximum(found, 0.0)


def _nearest(op: str, label: str, gpu: Key, form: str) -> list[int]:
    """The tables of an op, those nearest to a GPU and a format first."""
    return sorted(tables_of(op, label), key=lambda i: _apart(i, gpu, form))


@cache
def held_out(op: str, label: str, table: int) -> Numbers:
    """ln(predicted / measured time) of each row of a table, predicted from the rows of all other shapes."""
    points, about = points_of(table), all_tables()[table]
    gpu = _key(GPUS[about.gpu])
    value, _ = _pulled(_nearest(op, label, gpu, about.format), points.where, gpu, about.format, without=table)
    start = constants.HEAVY_START[FAMILIES[op, label].kind]
    return np.log((start + points.floor / np.exp(value)) / points.seconds)


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
    described = GPUS.get(
        gpu_key(hardware), hardware
    )  # a "what if" with other peaks has the efficiencies of the real one
    return _curve(op, label, _key(described), form, tuple(sorted(sizes.items())), default)


@lru_cache(maxsize=4096)
def _curve(op: str, label: str, gpu: Key, form: str, sizes: tuple[tuple[str, float], ...], default: float) -> Curve:
    order = _nearest(op, label, gpu, form)
    if not order:
        return flat(default)
    family = FAMILIES[op, label]
    others = ACROSS if family.across else np.ones(1)
    given = {**dict(sizes), family.along: np.tile(GRID, len(others)), family.across: np.repeat(others, len(GRID))}
    value, pull = _pulled(order, _log(family.place(given)), gpu, form)
    values = np.exp(value).reshape(len(others), len(GRID))
    pull = pull.reshape(len(pull), len(others), len(GRID)).mean(1)
    if family.kind not in (
        "product",
        "experts",
    ):  # their work grows with the sizes, and more of it never takes less time
        work = GRID * (others[:, None] if family.across else 1.0)
        values = work / np.maximum.accumulate(np.maximum.accumulate(work / values, axis=1), axis=0)
    if not family.across:
        values = values[0]
    own = sum((pull[n] for n, i in enumerate(order) if _apart(i, gpu, form) == 0.0), np.zeros(len(GRID)))
    about = all_tables()[order[int(np.argmax(pull.sum(-1)))]]
    return Curve(values, tuple(order), pull, own, op, label, about.includes)
