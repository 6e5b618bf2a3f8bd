"""The published points: complete, and predicted no worse than was committed."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.compare import committed_means, compare, mean_errors, published, served


@pytest.fixture(scope="module")
def results():
    return compare()


def test_the_mean_error_is_no_worse_than_committed(results):
    for group, mean in mean_errors(results).items():
        assert mean <= committed_means()[group], [(result.name, f"{result.error:+.1%}") for result in results]


def test_most_points_lie_in_their_intervals(results):
    inside = [result.low <= result.measured <= result.high for result in results]
    assert sum(inside) / len(inside) >= 0.7


def test_the_bars_of_the_throughput_table_are_met(results):
    errors = [abs(result.error) for result in results if result.group == "throughput"]
    assert sum(errors) / len(errors) <= 0.06
    assert max(errors) <= 0.10


def test_every_point_says_where_it_is_from_and_what_ran():
    for point in published()["points"]:
        assert point["source"]
        assert len(point["workload"]) > 40
    assert served()["source"]
    assert len(served()["rows"]) > 50
