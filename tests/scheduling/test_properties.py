"""Whatever comes, in whatever order: answers are those of a model without cache, nothing leaks, nothing gets stuck."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from scheduling.scenarios import scenario
from scheduling.simulated import Driver


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
