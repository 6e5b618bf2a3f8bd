"""Whatever comes, in whatever order: answers are those of a model without cache, and nothing leaks."""

from __future__ import annotations

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from scheduling.simulated import Driver, Job, options

from firstlight.scheduling.arena import CacheGeometry

PREFIXES = [[], [1] * 70, [1] * 70 + [2] * 75, [1] * 70 + [3] * 30, [4, 5] * 9]


@st.composite
def jobs(draw, longest: int):
    prompt = list(draw(st.sampled_from(PREFIXES)))
    prompt += draw(st.lists(st.integers(0, 5), min_size=1, max_size=20))
    prompt = prompt[:longest]
    arrival = draw(st.integers(0, 12))
    return Job(
        prompt,
        draw(st.integers(1, 24)),
        arrival,
        draw(st.booleans()),
        draw(st.sampled_from([(), (0,), (1, 2)])),
        draw(st.one_of(st.none(), st.integers(arrival, 30))),
        draw(st.integers(0, 1)),
    )


@st.composite
def scenarios(draw):
    page_size = draw(st.sampled_from([1, 3, 4, 16, 64]))
    has_state = draw(st.booleans())
    checkpoints = draw(st.integers(0, 5)) if has_state else 0
    drafts = draw(st.sampled_from([0, 0, 0, 2]))
    depth = draw(st.sampled_from([1, 2, 4]))
    needed = 180 + 24 + depth * drafts
    pages = -(-needed // page_size) + draw(st.sampled_from([0, 1, 2, 5, 40]))
    geometry = CacheGeometry(
        page_size,
        pages,
        checkpoints + draw(st.integers(1, 4)) if has_state else 0,
        checkpoints,
        pair_flops=draw(st.sampled_from([0.0, 0.01])),
    )
    engine = options(
        max_running=draw(st.sampled_from([1, 2, 4, 16])),
        step_tokens=draw(st.sampled_from([1 + drafts, 7 + drafts, 64, 80, 256])),
        offline_step_tokens=draw(st.sampled_from([1, 16, 256])),
        offline_share=draw(st.sampled_from([0.0, 0.05, 0.5])),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        depth=depth,
    )
    driver = {
        "geometry": geometry,
        "engine": engine,
        "max_context": draw(st.sampled_from([190, 4096])),
        "drafts": drafts,
        "seed": draw(st.integers(0, 99)),
        "skip": draw(st.sampled_from([0.0, 0.0, 0.2])),
        "stop_on_device": draw(st.booleans()),
    }
    return driver, draw(st.lists(jobs(165), min_size=1, max_size=10))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(scenarios())
def test_answers_and_conservation(scenario):
    given_driver, given_jobs = scenario
    note(f"seed {given_driver['seed']}")
    Driver(**given_driver).run(given_jobs)
