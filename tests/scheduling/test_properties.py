"""Whatever comes, in whatever order: answers are those of a model without cache, nothing leaks, nothing gets stuck."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from scheduling.scenarios import scenario
from scheduling.simulated import Driver, Job, options

from firstlight.scheduling.arena import CacheGeometry


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(st.randoms(use_true_random=False))
def test_answers_and_conservation(random):
    driver, jobs = scenario(random)
    note(f"{driver}\n{jobs}")
    Driver(**driver).run(jobs)


@pytest.mark.parametrize("seed", range(8))
def test_many_seeded_scenarios(seed):
    """A sweep that is the same on every machine."""
    for part in range(50):
        print(f"seed {50 * seed + part}")
        driver, jobs = scenario(Random(50 * seed + part))
        Driver(**driver).run(jobs)


FOUND = {
    3: "a request stripped of its pages while draining went on to release pages that it had not taken yet",
    117: "a draining request kept its hold on pages that it put into the tree after its preemption",
    126: "an offline prefill went ahead of online work, and was preempted by it in the same plan",
}


@pytest.mark.parametrize("seed", FOUND)
def test_found_failures(seed):
    driver, jobs = scenario(Random(seed))
    Driver(**driver).run(jobs)


def test_grown_preempted_and_back_in_one_plan():
    """Found: the page table's entries of such a request were written twice."""
    geometry = CacheGeometry(page_size=4, pages=5)
    driver = Driver(geometry, options(depth=1, prefix_cache=False), drafts=2)
    driver.run([Job([1] * 6, 12, online=False), Job([2] * 6, 12)])
    plan = driver.plans[1]
    assert [join.request_id for join in plan.joins] == ["job0"]
    assert plan.leaves.tolist() == [plan.joins[0].row]
