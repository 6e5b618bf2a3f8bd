"""What a bound call costs over the function itself: at most 0.3 us is the rule.

    python benchmarks/bound_call.py

A call site is a list with one bound function per bucket; calling it is a list index. Timed against a direct call of the
same function, in turns, so that a noisy machine disturbs both alike; the median of the differences counts.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

from firstlight.ops.op import CallSite
from firstlight.ops.rms_norm import rms_norm

CALLS = 20_000
ROUNDS = 25
LIMIT_US = 0.3


def function(x: object, weight: object, *, eps: float) -> object:
    """Stands for a provider: does nothing, so that only the call is timed."""
    return x


def timed(module: SimpleNamespace, step: SimpleNamespace, bound: bool) -> float:
    """Microseconds of one call, as a module makes it."""
    x = weight = object()
    start = time.perf_counter()
    if bound:
        for _ in range(CALLS):
            module.norm[step.bucket.index](x, weight, eps=1e-6)
    else:
        for _ in range(CALLS):
            module.function(x, weight, eps=1e-6)
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    """Print the medians and fail beyond the limit."""
    site = CallSite(rms_norm)
    site[:] = [function] * 4
    module = SimpleNamespace(norm=site, function=function)
    step = SimpleNamespace(bucket=SimpleNamespace(index=2))
    assert module.norm[step.bucket.index](1, None, eps=0.0) == 1
    pairs = [(timed(module, step, True), timed(module, step, False)) for _ in range(ROUNDS)]
    bound, direct = (statistics.median(times) for times in zip(*pairs, strict=True))
    overhead = statistics.median(b - d for b, d in pairs)
    print(f"direct {direct:.3f} us, bound {bound:.3f} us, overhead {overhead:.3f} us (limit {LIMIT_US})")
    if overhead > LIMIT_US:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
