"""What `firstlight ops` shows: the choices of binding, for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from firstlight.config import EngineOptions
from firstlight.engine.loading import bind_only
from firstlight.hardware import Hardware
from firstlight.ops.binding import Choice
from firstlight.ops.op import sites
from firstlight.step import Bucket

HEAD = ("op", "provider", "buckets", "where")
INDENT = 6
"""Characters before a line of refusals, so that the rows of ops stand out."""


@dataclass(slots=True)
class _Row:
    """buckets: those in which the provider computes the op there. refused: the same for each (other provider, reason)."""

    buckets: set[int] = field(default_factory=set)
    refused: dict[tuple[str, str], set[int]] = field(default_factory=dict)


def ops_report(options: EngineOptions, hardware: Hardware | None, every_site: bool) -> Iterator[RenderableType]:
    """The choices, a row each, with refusals below. Sites of different layers that were bound alike share a row, unless
    `every_site`."""
    loaded = bind_only(options, hardware=hardware)
    yield Text(f"{loaded.hardware.name}, {str(loaded.dtype).removeprefix('torch.')}; buckets:")
    for rung in loaded.buckets:
        yield Text(f"  {_bucket(rung)}")
    rows: dict[tuple[str, str, str], _Row] = {}
    for path, site in [*sites(loaded.model), *sites(loaded.sampler)]:
        where = path if every_site else re.sub(r"\.\d+\.", ".*.", path)
        for bucket, choice in enumerate(site.choices):
            for depth, part in _with_parts(choice):
                if any(name == "*" for name, _ in part.refused):  # not called in this bucket
                    continue
                row = rows.setdefault(("  " * depth + part.op, part.provider, where), _Row())
                row.buckets.add(bucket)
                for refusal in part.refused:
                    row.refused.setdefault(refusal, set()).add(bucket)
    cells = [(op, provider, ranges(row.buckets), where) for (op, provider, where), row in rows.items()]
    widths = [max(map(len, column)) for column in zip(HEAD, *cells, strict=True)]
    yield Text()
    yield Text(_line(HEAD, widths), style="bold")
    for line, row in zip(cells, rows.values(), strict=True):
        yield Text(_line(line, widths))
        for reason in _refusals(row):
            yield Padding(Text(reason, style="dim"), (0, 0, 0, INDENT), expand=False)
    if packed := len(loaded.binding.layouts):
        yield Text()
        names = ", ".join(sorted(set(loaded.binding.layouts.values())))
        yield Text(
            f"{packed} weights are packed for their provider: {names}"
            if packed > 1
            else f"1 weight is packed for its provider: {names}"
        )


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people: 0-3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _refusals(row: _Row) -> Iterator[str]:
    """A line for each reason, with all whom it holds for. Reasons that differ only in the sizes of buckets share one."""
    alike: dict[tuple[str, str], list[tuple[str, set[int]]]] = {}
    for (name, reason), buckets in row.refused.items():
        alike.setdefault((name, re.sub(r"\d+", "#", reason)), []).append((reason, buckets))
    names: dict[tuple[str, str], list[str]] = {}
    for (name, _), found in alike.items():
        buckets = set().union(*(where for _, where in found))
        where = "" if buckets == row.buckets else f" (buckets {ranges(buckets)})"
        names.setdefault((_merged([reason for reason, _ in found]), where), []).append(name)
    for (reason, where), refused in names.items():
        yield f"not {', '.join(refused)}: {reason}{where}"


def _merged(reasons: list[str]) -> str:
    """One text of several that differ in numbers: "not 32" and "not 256" become "not 32 to 256"."""
    numbers = iter(zip(*(map(int, re.findall(r"\d+", reason)) for reason in reasons), strict=True))

    def spread(_: re.Match[str]) -> str:
        values = next(numbers)
        return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"

    return re.sub(r"\d+", spread, reasons[0])


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _with_parts(choice: Choice, depth: int = 0) -> Iterator[tuple[int, Choice]]:
    yield depth, choice
    for part in choice.parts:
        yield from _with_parts(part, depth + 1)


def _bucket(bucket: Bucket) -> str:
    kind = "decode" if bucket.query == 1 else f"prefill, {bucket.tokens:,} token{'s' * (bucket.tokens != 1)}"
    return f"{bucket.index}: {kind}, {bucket.requests:,} row{'s' * (bucket.requests != 1)}"
