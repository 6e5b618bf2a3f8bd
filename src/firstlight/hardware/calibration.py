"""Calibration tables: how long kernels really took, by GPU. No torch.

A file `tables/<gpu>.json` holds groups of rows. A group is one op computed by one provider in one format:

    {"gpu": "h200", "groups": [{"op": "linear", "provider": "deep_gemm", "format": "float8_e4m3fn", "source": "...",
      "axes": ["tokens", "rows", "columns"], "rows": [[64, 12288, 2048, 15.2], ...]}]}

Each row has the sizes named by `axes`, then microseconds. "label" tells decode from prefill where an op has both. "includes"
names work beyond the op's products that was timed with them. "versions" names the software, if it is known. What is read
from a table is an efficiency (the least possible time over the measured one), never a latency.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tables"
REQUIRED = ("op", "provider", "format", "source", "axes", "rows")


class CalibrationError(ValueError):
    """A calibration table that can't be used; the message names the file, the group and what is wrong."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Timings of one op by one provider on one GPU. rows: (sizes in the order of `axes`, seconds)."""

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


def read_table(path: Path) -> list[Measured]:
    """The groups of one file. Raises CalibrationError."""
    try:
        content = json.loads(path.read_text())
        return [_group(content["gpu"], group) for group in content["groups"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"{path}: {error}") from error


def _group(gpu: str, group: Mapping[str, Any]) -> Measured:
    missing = [name for name in REQUIRED if name not in group]
    if missing:
        raise ValueError(f"group {group.get('op', '?')}: {', '.join(missing)} missing")
    width, seen, rows = len(group["axes"]), set(), []
    for *sizes, microseconds in group["rows"]:
        if len(sizes) != width or not microseconds > 0 or tuple(sizes) in seen:
            what = "was given twice" if tuple(sizes) in seen else f"needs {width} sizes and a time above 0"
            raise ValueError(f"group {group['op']}: row {[*sizes, microseconds]} {what}")
        seen.add(tuple(sizes))
        rows.append((tuple(map(float, sizes)), microseconds * 1e-6))
    return Measured(
        gpu,
        group["op"],
        group.get("label", ""),
        group["provider"],
        group["format"],
        group["source"],
        tuple(group["axes"]),
        tuple(rows),
        group.get("includes", ""),
        group.get("versions", {}),
    )


@lru_cache(maxsize=1)
def all_tables() -> tuple[Measured, ...]:
    """Every group of every table that comes with the package."""
    return tuple(group for path in sorted(TABLES.glob("*.json")) for group in read_table(path))
