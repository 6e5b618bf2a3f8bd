"""Print each published point with its prediction; exit 1 if the mean error is worse than the committed one."""

from __future__ import annotations

import sys

from benchmarks.accuracy.compare import committed_mean, compare, mean_error


def main() -> int:
    """The comparison as a table on stdout."""
    results = compare()
    print(f"{'point':34} {'measured':>9} {'predicted':>9} {'80 % interval':>15} {'error':>7}   tokens/s/GPU")
    for result in results:
        interval = f"{result.low:,.0f}-{result.high:,.0f}"
        inside = "inside" if result.low <= result.measured <= result.high else "outside"
        print(
            f"{result.name:34} {result.measured:9,.0f} {result.predicted:9,.0f} {interval:>15} {result.error:+7.1%}   {inside}"
        )
    mean, worst = mean_error(results), max(abs(result.error) for result in results)
    print(f"mean error {mean:.1%} (committed: {committed_mean():.1%}), worst {worst:.1%}")
    if mean > committed_mean():
        print("The mean error is worse than the committed one.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
