"""What `firstlight profile` shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from firstlight.calibrate.profile import Line, Profile
from firstlight.hardware import Hardware


def profile_report(made: Profile, hardware: Hardware, *, why: bool) -> Iterator[RenderableType]:
    """A row for each line, the most expensive first, then the sum beside the whole step."""
    yield Text(f"{hardware.name}; {made.tokens:,} tokens in a bucket of {made.bucket.tokens:,}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("op", "where", "provider"):
        table.add_column(name, overflow="fold")
    for name in ("calls", "us each", "floor", "fraction", "us in all", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in sorted(made.lines, key=lambda line: -line.seconds * line.count):
        table.add_row(*_cells(line, made.total))
        if why:
            for name, reason in line.refused:
                table.add_row("", Text(f"not {name}: {reason}", style="dim"))
    yield table
    floor = sum(line.floor * line.count for line in made.lines)
    how = "in one CUDA graph" if made.captured else "op by op, launches included"
    yield Text(
        f"sum {made.total * 1e3:.3f} ms; the whole step {how}: {made.whole * 1e3:.3f} ms; floor {floor * 1e3:.3f} ms"
        + (f" ({floor / made.whole:.0%} of it)" if floor else " (this hardware's peaks are not described)")
    )
    if any(line.launch_bound for line in made.lines) and made.captured:
        yield Text("* timed with its launches: it can't be part of a graph")


def _cells(line: Line, total: float) -> tuple[str, ...]:
    return (
        line.op,
        line.where,
        line.provider,
        f"{line.count:,}",
        f"{line.seconds * 1e6:,.1f}" + ("*" if line.launch_bound else ""),
        f"{line.floor * 1e6:,.1f}" if line.floor else "",
        f"{line.floor / line.seconds:.0%}" if line.floor else "",
        f"{line.seconds * line.count * 1e6:,.1f}",
        f"{line.seconds * line.count / total:.1%}",
    )


def profile_json(made: Profile) -> str:
    """Everything, times in seconds."""
    content = {"lines": [asdict(line) for line in made.lines], "sum": made.total, "whole": made.whole}
    return json.dumps({**content, "captured": made.captured, "tokens": made.tokens}, indent=1)
