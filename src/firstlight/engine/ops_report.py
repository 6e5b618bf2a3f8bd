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
from firstlight.ops.binding import Choice, microseconds
from firstlight.ops.op import across_layers, sites
from firstlight.parallel import Mesh
from firstlight.quant import dtype_name
from firstlight.step import Bucket

HEAD = ("op", "provider", "buckets", "where")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
INDENT = 6
"""Characters before a line of refusals, so that the rows of ops stand out."""


@dataclass(slots=True)
class _Row:
    """buckets: those in which the provider computes the op there. chosen: the same by why it was chosen; handed: by the form in
    which it gives or reads what can be packed; refused: by (other provider, reason)."""

    buckets: set[int] = field(default_factory=set)
    chosen: dict[str, set[int]] = field(default_factory=dict)
    handed: dict[str, set[int]] = field(default_factory=dict)
    refused: dict[tuple[str, str], set[int]] = field(default_factory=dict)


def ops_report(options: EngineOptions, hardware: Hardware | None, every_site: bool) -> Iterator[RenderableType]:
    """The choices, a row each, with refusals below. Sites of different layers that were bound alike share a row, unless
    `every_site`. Those of the first rank, where ranks split the layers."""
    loaded = bind_only(options, Mesh.of(tp=options.tensor_parallel), hardware=hardware)
    kinds = [dtype_name(loaded.dtype)]
    if options.kv_dtype != "auto":
        kinds.append(f"KV pages in {options.kv_dtype}")
    if options.state_dtype != "auto":
        kinds.append(f"states in {options.state_dtype}")
    yield Text(f"{loaded.hardware.name}, {', '.join(kinds)}; buckets:")
    for rung in loaded.buckets:
        yield Text(f"  {_bucket(rung)}")
    rows: dict[tuple[str, str, str], _Row] = {}
    for path, site in [*sites(loaded.requests), *sites(loaded.model), *sites(loaded.sampler)]:
        where = path if every_site else across_layers(path)
        for bucket, choice in enumerate(site.choices):
            for depth, part in choice.with_parts():
                row = rows.setdefault(("  " * depth + part.op, part.provider, where), _Row())
                row.buckets.add(bucket)
                if why := _why(part):
                    row.chosen.setdefault(why, set()).add(bucket)
                if part.handover:
                    row.handed.setdefault(part.handover, set()).add(bucket)
                for refusal in part.refused:
                    row.refused.setdefault(refusal, set()).add(bucket)
    cells = [(op, provider, ranges(row.buckets), where) for (op, provider, where), row in rows.items()]
    widths = [max(map(len, column)) for column in zip(HEAD, *cells, strict=True)]
    yield Text()
    yield Text(_line(HEAD, widths), style="bold")
    for line, row in zip(cells, rows.values(), strict=True):
        yield Text(_line(line, widths))
        for reason in (*_reasons(row), *_refusals(row)):
            yield Padding(Text(reason, style="dim"), (0, 0, 0, INDENT), expand=False)
    if packed := len(loaded.binding.layouts):
        yield Text()
        names = ", ".join(sorted(set(loaded.binding.layouts.values())))
        yield Text(
            f"{packed} weights are packed for their provider: {names}"
            if packed > 1
            else f"1 weight is packed for its provider: {names}"
        )


def _why(choice: Choice) -> str:
    """Why a provider was chosen, if others could have served."""
    if choice.seconds:
        after = f", next {choice.runner_up[0]} {microseconds(choice.runner_up[1])} us" if choice.runner_up else ""
        return f"measured {microseconds(choice.seconds)} us{after}"
    return "by rank" if any(reason.endswith("ranks higher") for _, reason in choice.refused) else ""


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people: 0-3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _reasons(row: _Row) -> Iterator[str]:
    """A line for each way in which the provider was chosen, and for each form in which it gives or reads."""
    for texts in (row.chosen, row.handed):
        for why, buckets in _together(texts.items()):
            yield why + _where(row, buckets)


def _refusals(row: _Row) -> Iterator[str]:
    """A line for each reason, with all whom it holds for."""
    found: dict[str, list[tuple[str, set[int]]]] = {}
    for (name, reason), buckets in row.refused.items():
        found.setdefault(name, []).append((reason, buckets))
    names: dict[tuple[str, str], list[str]] = {}
    for name, reasons in found.items():
        for reason, buckets in _together(reasons):
            names.setdefault((reason, _where(row, buckets)), []).append(name)
    for (reason, where), refused in names.items():
        yield f"not {', '.join(refused)}: {reason}{where}"


def _where(row: _Row, buckets: set[int]) -> str:
    return "" if buckets == row.buckets else f" (buckets {ranges(buckets)})"


def _together(texts: Iterable[tuple[str, set[int]]]) -> Iterator[tuple[str, set[int]]]:
    """Texts that differ only in numbers (the sizes of buckets, times) become one."""
    alike: dict[str, list[tuple[str, set[int]]]] = {}
    for text, buckets in texts:
        alike.setdefault(NUMBER.sub("#", text), []).append((text, buckets))
    for found in alike.values():
        yield _merged([text for text, _ in found]), set().union(*(buckets for _, buckets in found))


def _merged(reasons: list[str]) -> str:
    """One text of several that differ in numbers: "not 32" and "not 256" become "not 32 to 256"."""
    numbers = iter(zip(*(NUMBER.findall(reason) for reason in reasons), strict=True))

    def spread(_: re.Match[str]) -> str:
        values = sorted(next(numbers), key=float)
        return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"

    return NUMBER.sub(spread, reasons[0])


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _bucket(bucket: Bucket) -> str:
    kind = "decode" if bucket.query == 1 else f"prefill, {bucket.tokens:,} token{'s' * (bucket.tokens != 1)}"
    return f"{bucket.index}: {kind}, {bucket.requests:,} row{'s' * (bucket.requests != 1)}"
