"""Print each published point with its prediction; exit 1 if a set's mean error is worse than the committed one."""

from __future__ import annotations

import sys

from benchmarks.accuracy.compare import committed_means, compare, mean_errors


def main() -> int:
    """The comparison as a table on stdout."""
    results = compare()
    print(f"{'point':46} {'measured':>9} {'predicted':>9} {'80 % interval':>15} {'error':>7}   tokens/s/GPU")
    for result in results:
        interval = f"{result.low:,.0f}-{result.high:,.0f}"
        inside = "inside" if result.low <= result.measured <= result.high else "outside"
        print(
            f"{result.name:46} {result.measured:9,.0f} {result.predicted:9,.0f} {interval:>15} {result.error:+7.1%}   {inside}"
        )
    status = 0
    for group, mean in mean_errors(results).items():
        committed, worst = committed_means()[group], max(abs(r.error) for r in results if r.group == group)
        print(f"{group}: mean error {mean:.1%} (committed: {committed:.1%}), worst {worst:.1%}")
        if mean > committed:
            print(f"{group}: the mean error is worse than the committed one.", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
