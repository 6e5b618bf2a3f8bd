"""What must not change an answer: caching, chunking, batching, preemption, plans in flight; alone and in pairs.

Every engine starts with all cache memory at NaN, so that a read of a null, freed or unwritten row shows at once.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from driver import GREEDY, VARIANTS, answer, drain, engine, prompts, reference_answer, request, small_cache
from reference import FAMILIES, HYBRIDS, reference_model, save_checkpoint

from firstlight.scheduling.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = save_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def expected():
    """transformers' answers to the prompts of `driver.prompts`, by family."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = [reference_answer(reference_model(name), prompt) for prompt in prompts()]
        return known[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_transformers(name, checkpoints, expected):
    assert answer(engine(checkpoints(name)), prompts()) == expected(name)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_how_a_step_is_made_up_changes_no_token(name, variant, checkpoints, expected):
    running = engine(checkpoints(name), **VARIANTS[variant])
    assert answer(running, prompts()) == expected(name)
    assert answer(running, prompts()) == expected(name)  # now with what the first round left in the cache


@pytest.mark.parametrize("name", ["qwen3_moe", *HYBRIDS])
@pytest.mark.parametrize(
    "pair",
    list(itertools.combinations(("chunks of 16", "no prefix cache", "two plans in flight", "pages of 64"), 2)),
    ids=" and ".join,
)
def test_pairs_change_no_token(name, pair, checkpoints, expected):
    options = VARIANTS[pair[0]] | VARIANTS[pair[1]]
    running = engine(checkpoints(name), **options)
    for _ in range(2):
        assert answer(running, prompts()) == expected(name)


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_no_token(name, depth, checkpoints):
    long = SamplingParams(temperature=0, max_tokens=60)
    asked = prompts((40, 35, 50, 20, 64, 3), seed=9)
    calm = answer(engine(checkpoints(name), cache_gib=0.1), asked, long)
    tight = engine(checkpoints(name), depth=depth, **small_cache(checkpoints(name), pages=18, live=5))
    assert answer(tight, asked, long) == calm
    assert tight.scheduler.metrics.preemptions > 0, "the cache was meant to be too small for all at once"


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_a_longer_conversation_continues_from_the_cache(name, checkpoints):
    running, alone = engine(checkpoints(name)), engine(checkpoints(name), prefix_cache=False)
    history = prompts((90,), seed=3)[0]
    for turn in range(4):
        history = history + prompts((11,), seed=20 + turn)[0]
        got, want = answer(running, [history])[0], answer(alone, [history])[0]
        assert got == want
        history = history + got
    assert running.scheduler.metrics.matched_tokens > 3 * 90


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_moe_text"])
def test_sampling_is_the_same_batched_or_alone(name, checkpoints):
    warm = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=12, top_k=0 if i % 2 else 20) for i in range(4)
    ]
    asked = prompts((5, 40, 70, 12))
    together = engine(checkpoints(name))
    for i, prompt in enumerate(asked):
        together.add(request(str(i), prompt, warm[i]))
    batched = drain(together)
    for i, prompt in enumerate(asked):
        single = engine(checkpoints(name), step_tokens=16)
        single.add(request("x", prompt, warm[i]))
        assert drain(single)["x"] == batched[str(i)]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-37, 1e-6, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature, checkpoints):
    """Logits divided by 1e-40 are infinite in float32."""
    running = engine(checkpoints("qwen3"))
    greedy = answer(running, prompts())
    for top_p in (1.0, 0.9):
        sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=3, max_tokens=16)
        assert answer(running, prompts(), sampling) == greedy


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_requests_that_come_and_go_leave_nothing_behind(name, checkpoints):
    running = engine(checkpoints(name), cache_gib=0.004)
    generator = torch.Generator().manual_seed(11)
    live: list[str] = []
    for i in range(60):
        length = int(torch.randint(1, 60, (1,), generator=generator))
        running.add(request(f"q{i}", prompts((length,), seed=i)[0], GREEDY))
        live.append(f"q{i}")
        for _ in range(int(torch.randint(0, 4, (1,), generator=generator))):
            running.step()
        if i % 3 == 0:
            running.abort(live.pop(int(torch.randint(0, len(live), (1,), generator=generator))))
    drain(running)
    running.scheduler.clear_cache()
    stats = running.stats()
    assert (stats.pages_used, stats.slots_used) == (0, 0)
