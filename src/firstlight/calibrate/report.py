"""What a calibration found wrong, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from firstlight.calibrate.sweep import Result, Scratch
from firstlight.ops.sizes import Sizes


def failures(results: Sequence[Result]) -> Iterator[str]:
    """A line for each provider and reason, with the calls it holds for."""
    found: dict[tuple[str, str, str], list[Sizes]] = {}
    for result in results:
        if result.reason:
            name = f"{result.op}.{result.label}" if result.label else result.op
            found.setdefault((name, result.provider, result.reason), []).append(result.sizes)
    for (name, provider, reason), sizes in found.items():
        more = f" and {len(sizes) - 1} more calls" if len(sizes) > 1 else ""
        yield f"refused: {provider} of {name} at {described(sizes[0])}{more}: {reason}"


def scratch_lines(scratch: Mapping[tuple[str, str], Scratch]) -> Iterable[str]:
    """A line for each provider that took more scratch memory than it declares."""
    for (op, provider), found in sorted(scratch.items()):
        yield (
            f"scratch: {provider} of {op} took {found.used / 2**20:.1f} MiB and declares {found.declared / 2**20:.1f} MiB "
            f"at {described(found.sizes)}"
        )


def described(sizes: Sizes) -> str:
    """Sizes in a line."""
    return ", ".join(f"{name} {size}" for name, size in {**sizes.step, **sizes.fixed}.items())
