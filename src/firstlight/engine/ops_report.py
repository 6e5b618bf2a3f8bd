"""What `firstlight ops` shows: the choices of binding, for people."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.table import Table

from firstlight.config import EngineOptions
from firstlight.engine.loading import bind_only
from firstlight.hardware import Hardware
from firstlight.ops.binding import Choice
from firstlight.ops.op import sites
from firstlight.step import Bucket


def ops_table(options: EngineOptions, hardware: Hardware | None, every_site: bool) -> Iterator[Table | str]:
    """The table of choices. Sites of different layers that were bound alike share a line, unless `every_site`."""
    loaded = bind_only(options, hardware=hardware)
    yield f"{loaded.hardware.name}, {str(loaded.dtype).removeprefix('torch.')}; buckets: " + "; ".join(
        _bucket(bucket) for bucket in loaded.buckets
    )
    lines: dict[tuple[str, str, str, str], list[str]] = {}
    for path, site in [*sites(loaded.model), *sites(loaded.sampler)]:
        where = path if every_site else re.sub(r"\.\d+\.", ".*.", path)
        for bucket, choice in enumerate(site.choices):
            for depth, part in _with_parts(choice):
                refused = "\n".join(f"{name}: {reason}" for name, reason in part.refused if name != "*")
                if not any(name == "*" for name, _ in part.refused):
                    key = ("  " * depth + part.op, where, part.provider, refused)
                    lines.setdefault(key, []).append(str(bucket))
    table = Table("op", "where", "provider", "buckets", "refused, and why")
    for (op, where, provider, refused), buckets in lines.items():
        table.add_row(op, where, provider, ",".join(sorted(set(buckets), key=int)), refused)
    yield table
    if loaded.binding.layouts:
        yield f"{len(loaded.binding.layouts)} weights are packed for their provider: " + ", ".join(
            sorted(set(loaded.binding.layouts.values()))
        )


def _with_parts(choice: Choice, depth: int = 0) -> Iterator[tuple[int, Choice]]:
    yield depth, choice
    for part in choice.parts:
        yield from _with_parts(part, depth + 1)


def _bucket(bucket: Bucket) -> str:
    kind = "decode" if bucket.query == 1 else f"prefill, {bucket.tokens} tokens"
    return f"{bucket.index}: {kind}, {bucket.requests} rows"
