"""Calibration tables: how long kernels really took, by GPU. No torch.

A file holds groups of rows. A group is one op computed by one provider in one format:

    {"gpu": "h200", "groups": [{"op": "linear", "provider": "deep_gemm", "format": "float8_e4m3fn", "source": "...",
      "axes": ["tokens", "rows", "columns"], "rows": [[64, 12288, 2048, 15.2], ...]}]}

Each row has the sizes named by `axes`, then microseconds. "fixed" gives sizes that all rows of the group share:
{"fixed": {"rows": 12288, "columns": 2048}, "axes": ["tokens"], "rows": [[64, 15.2]]} says the same. "label" tells decode from
prefill where an op has both. "dtype" names that of the activations where the format is the weight's. "includes" names work
beyond the op's products that was timed with them. "refused" lists calls that the provider failed, as sizes and the reason.
"versions" names the software, if it is known. "source", "versions" and "dtype" beside "groups" hold for every group without
its own.

There are two kinds of file. `tables/*.json` are kernels that others, or we, published: prediction reads efficiencies from
them (the least possible time over the measured one), never latencies. `tables/calibrated/<gpu>.json` are written by
`firstlight calibrate`: our providers' times of whole calls, which binding chooses by (see `hardware.timings`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec

from firstlight.hardware.description import Hardware

TABLES = Path(__file__).parent / "tables"
CALIBRATED = TABLES / "calibrated"
REQUIRED = ("op", "provider", "format", "source", "axes", "rows")


class _Group(TypedDict, total=False):
    """A group as it stands in a file; `REQUIRED` says what it can't do without."""

    op: str
    label: str
    provider: str
    format: str
    source: str
    axes: list[str]
    fixed: dict[str, int | float]
    rows: list[list[int | float]]
    refused: list[list[int | float | str]]
    includes: str
    versions: dict[str, str]
    dtype: str


class _Content(TypedDict):
    """A file."""

    gpu: str
    groups: list[_Group]
    source: NotRequired[str]
    versions: NotRequired[dict[str, str]]
    dtype: NotRequired[str]


class CalibrationError(ValueError):
    """A calibration table that can't be used; the message names the file, the group and what is wrong."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Timings of one op by one provider on one GPU. rows: (sizes in the order of `axes`, seconds).

    dtype: of the activations, "" where the table doesn't say. refused: (sizes, reason) of calls that the provider failed.
    """

    gpu: str
    op: str
    label: str
    provider: str
    format: str
    source: str
    axes: tuple[str, ...]
    rows: tuple[tuple[tuple[float, ...], float], ...]
    includes: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    refused: tuple[tuple[tuple[float, ...], str], ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """One file. gpu: the key of its GPU, or the name of a device that isn't described. path: "" if it wasn't read from one."""

    gpu: str
    groups: tuple[Measured, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    path: str = ""


def read_table(path: Path) -> Table:
    """One file. Raises CalibrationError."""
    try:
        content = msgspec.convert(json.loads(path.read_text()), _Content)
        shared: dict[str, Any] = {name: content[name] for name in ("source", "versions", "dtype") if name in content}
        groups = tuple(_group(content["gpu"], {**shared, **group}) for group in content["groups"])
        return Table(content["gpu"], groups, content.get("versions", {}), str(path))
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CalibrationError(f"{path}: not a table of `firstlight calibrate`, which is JSON: {error}") from error
    except msgspec.ValidationError as error:
        what = str(error)[:1].lower() + str(error)[1:]
        raise CalibrationError(
            f"{path}: not a table of `firstlight calibrate`, which is an object with `gpu` and `groups`: {what}"
        ) from error
    except (ValueError, OverflowError) as error:
        raise CalibrationError(f"{path}: {error}") from error


def _group(gpu: str, group: Mapping[str, Any]) -> Measured:
    missing = [name for name in REQUIRED if name not in group]
    if missing:
        raise ValueError(f"group {group.get('op', '?')}: {', '.join(missing)} missing")
    width, seen, rows = len(group["axes"]), set(), []
    fixed = {name: float(size) for name, size in group.get("fixed", {}).items()}
    if twice := sorted(set(fixed) & set(group["axes"])):
        raise ValueError(f"group {group['op']}: {', '.join(twice)} is fixed and an axis")
    for row in group["rows"]:
        *sizes, microseconds = row or [math.nan]
        if len(sizes) != width or not 0 < microseconds < math.inf or tuple(sizes) in seen:
            what = "was given twice" if tuple(sizes) in seen else f"needs {width} sizes and a time above 0"
            raise ValueError(f"group {group['op']}: row {row} {what}")
        seen.add(tuple(sizes))
        rows.append(((*map(float, sizes), *fixed.values()), microseconds * 1e-6))
    refused = []
    for call in group.get("refused", ()):
        *sizes, reason = call or [math.nan]
        named = isinstance(reason, str) and not any(isinstance(size, str) for size in sizes)
        if len(sizes) != width or not named or tuple(sizes) in seen:
            what = "has a time as well" if tuple(sizes) in seen else f"needs {width} sizes and a reason"
            raise ValueError(f"group {group['op']}: refused call {call} {what}")
        refused.append(((*map(float, sizes), *fixed.values()), reason))
    axes = (*group["axes"], *fixed)
    for sizes, _ in (*rows, *refused):
        for name, size in zip(axes, sizes, strict=True):
            # Times run along the logarithm of tokens.
            if not 0 <= size < math.inf or (name == "tokens" and size == 0):
                raise ValueError(f"group {group['op']}: {name} is {size:g}; sizes are finite, and tokens above 0")
    return Measured(
        gpu,
        group["op"],
        group.get("label", ""),
        group["provider"],
        group["format"],
        group["source"],
        axes,
        tuple(rows),
        group.get("includes", ""),
        group.get("versions", {}),
        group.get("dtype", ""),
        tuple(refused),
    )


@lru_cache(maxsize=1)
def all_tables() -> tuple[Measured, ...]:
    """Every group of published kernels that comes with the package."""
    return tuple(group for path in sorted(TABLES.glob("*.json")) for group in read_table(path).groups)


def packaged_table(hardware: Hardware) -> Table | None:
    """The calibrated table that comes with the package for this hardware, or None."""
    path = CALIBRATED / f"{table_name(hardware)}.json"
    return _packaged(path) if path.exists() else None


@lru_cache(maxsize=8)
def _packaged(path: Path) -> Table:
    return read_table(path)


def table_name(hardware: Hardware) -> str:
    """What tables call a device: its key among the described GPUs, else its name."""
    from firstlight.hardware.gpus import GPUS

    return next((key for key, gpu in GPUS.items() if gpu.name == hardware.name), hardware.name)
