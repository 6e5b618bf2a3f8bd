"""What the scheduler promises, one case each."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from scheduling.simulated import Driver, Job, options

from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.errors import RequestRefusedError
from firstlight.scheduling.plan import StepResult
from firstlight.scheduling.sampling import FinishReason, ServiceClass

DENSE = CacheGeometry(page_size=16, pages=400)
HYBRID = CacheGeometry(page_size=16, pages=400, slots=24, checkpoint_slots=16)
BOTH = pytest.mark.parametrize("geometry", [DENSE, HYBRID], ids=["dense", "hybrid"])


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no other seed shares."""
    random = Random(seed)
    return [random.randrange(1000) for _ in range(length)]


def joined(plan) -> list[str]:
    """Requests that join in a plan."""
    return [join.request_id for join in plan.joins]


@BOTH
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("scarce", ["rows", "pages", "slots"])
def test_online_preempts_offline_in_the_next_plan(geometry, depth, scarce):
    """Whatever offline work occupies, with plans in flight or not, the online request is in the very next plan."""
    if scarce == "slots" and not geometry.has_state:
        pytest.skip("a dense model has no slots")
    pages = 26 if scarce == "pages" else 400
    slots = 4 if scarce == "slots" else 24
    tight = CacheGeometry(16, pages, slots if geometry.has_state else 0, slots // 2 if geometry.has_state else 0)
    driver = Driver(tight, options(max_running=4 if scarce == "rows" else 16, depth=depth, step_tokens=256))
    for index in range(4):
        driver.submit(f"offline{index}", Job(prompt(index, 50), 40, online=False))
    for _ in range(5):
        driver.plan()
        if len(driver.flights) == depth:
            driver.commit()
    driver.submit("online", Job(prompt(9, 200), 40))
    plan = driver.plan()
    assert joined(plan) == ["online"]
    assert driver.scheduler.metrics.preemptions > 0
    driver.finish()
    assert driver.answer("online") == Job(prompt(9, 200), 40).answer(4096)
    for index in range(4):
        assert driver.answer(f"offline{index}") == Job(prompt(index, 50), 40).answer(4096)


@BOTH
def test_preempted_request_resumes_from_the_cache(geometry):
    """Nothing of the 100 tokens is prefilled twice, but for what lies past the last full page."""
    driver = Driver(geometry, options(max_running=1, depth=1))
    driver.submit("offline", Job(prompt(0, 100), 200, online=False))
    for _ in range(20):
        driver.tick()
    driver.submit("online", Job(prompt(1, 10), 5))
    driver.finish()
    metrics = driver.scheduler.metrics
    assert metrics.preemptions == 1
    assert metrics.prefilled_tokens == 100 + 10 + 1
    assert driver.events["offline"][0].cached_tokens == 0


@BOTH
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_offline_keeps_its_share_under_constant_online_load(geometry, share):
    driver = Driver(geometry, options(max_running=8, step_tokens=128, offline_share=share, depth=2))
    random, offline, counted = Random(3), 0, 0
    for step in range(4000):
        for service, queue in driver.scheduler._queues.waiting.items():
            while len(queue) < 4:
                name, online = f"r{len(driver.events)}", service is ServiceClass.ONLINE
                driver.submit(name, Job(prompt(len(driver.events), random.randint(5, 150)), 30, online=online))
        if step == 500:
            offline, counted = 0, 0
        plan = driver.plan()
        if plan is not None:
            names = {row: holder.request.id for row, holder in enumerate(driver.scheduler._rows.holders) if holder}
            rows = [(row, 1) for row in plan.decode.rows.tolist()] + [
                (chunk.row, chunk.count) for chunk in plan.prefill
            ]
            offline += sum(count for row, count in rows if not driver.online[names[row]])
            counted += plan.bounds.tokens
        if plan is None or len(driver.flights) == 2:
            driver.commit()
    got = offline / counted
    print(f"offline share: {got:.4f} of {share}")
    assert share * 0.97 <= got <= share * 1.25 + 0.02


def test_offline_prefill_is_capped_in_every_step():
    driver = Driver(DENSE, options(step_tokens=256, offline_step_tokens=48, depth=2))
    for index in range(6):
        driver.submit(f"offline{index}", Job(prompt(index, 200), 4, online=False))
    driver.submit("online", Job(prompt(9, 300), 4))
    driver.finish()
    online_row = driver.plans[0].joins[-1].row
    for plan in driver.plans:
        chunks = [chunk.count for chunk in plan.prefill if plan.number > 1 or chunk.row != online_row]
        assert sum(chunks) <= 48
    assert sum(chunk.count for chunk in driver.plans[0].prefill) == 256


@BOTH
@pytest.mark.parametrize("beside", ["nobody", "offline", "online"])
def test_deep_in_a_context_a_chunk_is_no_more_work_than_at_its_start(geometry, beside):
    """If somebody waits for the step's end who isn't offline."""
    geometry = replace(geometry, pages=2000, pair_flops=1e-3)
    driver = Driver(geometry, options(step_tokens=1024, prefix_cache=False), max_context=20_000)
    if beside != "nobody":
        driver.submit("short", Job(prompt(1, 20), 200, online=beside == "online"))
        for _ in range(3):
            driver.tick()
    before = len(driver.plans)
    driver.submit("long", Job(prompt(2, 12_000), 4))
    driver.finish()
    plans = [plan for plan in driver.plans[before:] if plan.prefill]
    chunks = [(chunk.start, chunk.count) for plan in plans for chunk in plan.prefill]
    assert sum(count for _, count in chunks) == 12_000
    assert all(len(plan.decode.rows) == (beside != "nobody") for plan in plans)
    if beside != "online":
        assert len(chunks) in (12, 13)
        return
    work = [count * (1 + 1e-3 * (start + count / 2)) for start, count in chunks]
    assert max(work) <= 1024 * (1 + 1e-3 * 512)
    assert chunks[0] == (0, 1023 if not geometry.has_state else 960)
    assert chunks[-2][1] in (64, 96)
    assert len(chunks) < 100


def test_first_come_first_served_in_a_class():
    driver = Driver(DENSE, options(max_running=3, step_tokens=64))
    for index in range(12):
        driver.submit(f"r{index:02}", Job(prompt(index, 40 + 10 * (index % 3)), 6))
    driver.finish()
    order = [request_id for plan in driver.plans for request_id in joined(plan)]
    assert order == sorted(order)


@BOTH
@pytest.mark.parametrize("depth", [1, 3])
def test_abort_takes_effect_in_the_next_plan(geometry, depth):
    driver = Driver(geometry, options(max_running=2, step_tokens=64, depth=depth))
    for name, length in (("decoding", 20), ("prefilling", 500), ("waiting", 20)):
        driver.submit(name, Job(prompt(length + len(name), length), 50))
    driver.tick()
    driver.tick()
    rows = {join.request_id: join.row for plan in driver.plans for join in plan.joins}
    assert set(rows) == {"decoding", "prefilling"}
    for name in ("decoding", "prefilling", "waiting"):
        assert driver.scheduler.abort(name)
        assert not driver.scheduler.abort(name)
    before = {name: len(driver.events[name]) for name in driver.events}
    assert driver.plan() is None
    while driver.flights:
        driver.commit()
    assert {name: len(driver.events[name]) for name in driver.events} == before
    assert driver.scheduler.unfinished == 0
    assert driver.scheduler.running == 0
    driver.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job([], 5), "empty"),
        (Job([1], 0), "max_tokens is 0"),
        (Job([1] * 500, 5), "500 tokens"),
        (Job([1] * 200, 200), "has room for 320"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(job, message):
    driver = Driver(CacheGeometry(page_size=16, pages=20), options(), max_context=500)
    with pytest.raises(RequestRefusedError, match=message) as refused:
        driver.scheduler.submit(job.request("r"))
    assert refused.value.status == 400
    assert driver.scheduler.unfinished == 0
    driver.submit("r", Job([1] * 200, 120))  # the largest that fits
    with pytest.raises(RequestRefusedError, match="in use") as refused:
        driver.scheduler.submit(job.request("r"))
    assert refused.value.status == 409
    driver.finish()


def test_the_context_ends_an_answer():
    driver = Driver(DENSE, options(), max_context=64)
    driver.submit("r", Job(prompt(0, 50), 100))
    driver.finish()
    assert len(driver.answer("r")) == 14
    assert driver.events["r"][-1].finish is FinishReason.LENGTH


def test_stop_token_inside_accepted_drafts_cuts_the_answer():
    driver = Driver(DENSE, options(), drafts=3)
    job = Job(prompt(2, 30), 60, stops=(3,))
    driver.run([job])
    assert driver.answer("job0")[-1] == 3


@BOTH
@pytest.mark.parametrize("concurrent", [True, False])
def test_conversations_prefill_little_more_than_is_new(geometry, concurrent):
    """20 conversations of 8 turns over one system prompt of 600 tokens: at most 1.1 times what is new to the cache."""
    pages = CacheGeometry(16, 4000, 48 if geometry.has_state else 0, 32 if geometry.has_state else 0)
    driver = Driver(pages, options(max_running=16, step_tokens=512, depth=2), max_context=8192)
    system, random, ideal = prompt(99, 600), Random(5), 600
    conversations = [list(system) for _ in range(20)]
    for turn in range(8):
        for index, tokens in enumerate(conversations):
            question = [random.randrange(1000) for _ in range(random.randint(40, 120))]
            ideal += len(question)
            tokens += question
            name = f"{index}-{turn}"
            driver.submit(name, Job(tokens, 30))
            if not concurrent:
                driver.finish()
        driver.finish()
        for index, tokens in enumerate(conversations):
            tokens += driver.answer(f"{index}-{turn}")
    metrics = driver.scheduler.metrics
    print(f"prefilled {metrics.prefilled_tokens}, ideal {ideal}: {metrics.prefilled_tokens / ideal:.3f}; {metrics}")
    assert metrics.prefilled_tokens <= 1.1 * ideal


def test_a_repeated_prompt_runs_little():
    """Dense: its last page. Hybrid: at most the tail and one kernel chunk."""
    for geometry, most in ((DENSE, 16), (HYBRID, 64 + 8)):
        driver = Driver(geometry, options())
        for name in ("first", "second"):
            driver.submit(name, Job(prompt(0, 500), 8))
            driver.finish()
        assert driver.answer("first") == driver.answer("second")
        assert driver.events["second"][0].cached_tokens >= 500 - most


@BOTH
def test_requests_that_arrive_together_share_a_prefill(geometry):
    driver = Driver(geometry, options(step_tokens=2048, depth=2))
    for index in range(6):
        driver.submit(f"r{index}", Job(prompt(0, 256) + prompt(index + 1, 20), 4))
    driver.finish()
    assert driver.scheduler.metrics.prefilled_tokens == 256 + 6 * 20
    assert driver.scheduler.metrics.waited_for_prefix == 5


def test_tenants_share_nothing():
    driver = Driver(DENSE, options())
    for index in range(2):
        driver.submit(f"r{index}", Job(prompt(0, 100), 4, adapter=index))
        driver.finish()
        assert driver.events[f"r{index}"][0].cached_tokens == 0


def test_steady_decode_plans_share_their_arrays():
    """Nothing is rebuilt while the batch doesn't change."""
    driver = Driver(DENSE, options())
    for index in range(4):
        driver.submit(f"r{index}", Job(prompt(index, 10), 40))
    for _ in range(10):
        driver.tick()
    assert driver.plans[-1].decode.rows is driver.plans[-2].decode.rows
    assert len(driver.plans[-1].decode.rows) == 4


def test_results_that_do_not_belong_are_errors():
    driver = Driver(DENSE, options(depth=2))
    driver.submit("r", Job(prompt(0, 10), 10))
    first, second = driver.scheduler.plan(), driver.scheduler.plan()
    one = StepResult(np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    with pytest.raises(ValueError, match="oldest in flight is 0"):
        driver.scheduler.commit(second, one)
    with pytest.raises(ValueError, match="samples 1 rows"):
        driver.scheduler.commit(first, StepResult(np.zeros((2, 1), np.int32), np.ones(2, np.int32)))
    with pytest.raises(ValueError, match="counts"):
        driver.scheduler.commit(first, StepResult(np.zeros((1, 1), np.int32), np.full(1, 2, np.int32)))
    driver.scheduler.commit(first, one)


@BOTH
@pytest.mark.parametrize("depth", [1, 2])
def test_a_large_offline_request_is_not_starved(geometry, depth):
    """It needs most of the pages, and online requests never stop coming: in the end they make way."""
    tight = CacheGeometry(16, 30, 8 if geometry.has_state else 0, 4 if geometry.has_state else 0)
    driver = Driver(tight, options(max_running=8, step_tokens=64, depth=depth))
    for step in range(2000):
        if step == 50:
            driver.submit("offline", Job(prompt(1, 360), 60, online=False))
        if step > 50 and driver.events["offline"] and driver.events["offline"][-1].finish:
            break
        if driver.scheduler.waiting < 6:
            driver.submit(f"r{step}", Job(prompt(step + 2, 50), 20))
        driver.tick()
    print(f"offline request ended after {step} steps, {driver.scheduler.metrics}")
    assert driver.scheduler.metrics.preemptions <= 20
    assert driver.answer("offline") == Job(prompt(1, 360), 60).answer(4096)
