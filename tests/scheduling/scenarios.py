"""Random geometries, options and arrivals for the fake executor."""

from __future__ import annotations

from random import Random
from typing import Any

from scheduling.simulated import Job, options

from firstlight.scheduling.arena import CacheGeometry

PREFIXES = [[], [1] * 70, [1] * 70 + [2] * 75, [1] * 70 + [3] * 30, [4, 5] * 9]
LONGEST_PROMPT = 165
LONGEST_ANSWER = 24


def scenario(random: Random) -> tuple[dict[str, Any], list[Job]]:
    """Arguments for a `Driver`, and the jobs for its `run`.

    Pools are often so small that one request only just fits; prompts share prefixes, repeat each other, or continue
    another job's answer.
    """
    choice = random.choice
    page_size = choice([1, 3, 4, 16, 64])
    has_state = random.random() < 0.5
    checkpoints = random.randint(0, 5) if has_state else 0
    slots = checkpoints + random.randint(1, 4) if has_state else 0
    drafts, depth = choice([0, 0, 0, 2]), choice([1, 2, 4])
    longest = LONGEST_PROMPT + LONGEST_ANSWER + depth * drafts
    pages = -(-longest // page_size) + choice([0, 1, 2, 5, 40])
    driver = {
        "geometry": CacheGeometry(page_size, pages, slots, checkpoints, pair_flops=choice([0.0, 0.01])),
        "engine": options(
            max_running=choice([1, 2, 4, 16]),
            step_tokens=choice([1 + drafts, 7 + drafts, 64, 80, 256]),
            offline_step_tokens=choice([1, 16, 256]),
            offline_share=choice([0.0, 0.05, 0.5]),
            prefix_cache=random.random() < 0.8,
            depth=depth,
        ),
        "max_context": choice([185, 4096]),
        "drafts": drafts,
        "seed": random.randint(0, 99),
        "skip": choice([0.0, 0.0, 0.2]),
        "stop_on_device": random.random() < 0.5,
    }
    jobs: list[Job] = []
    for _ in range(random.randint(1, 10)):
        jobs.append(_job(random, jobs))
    return driver, jobs


def _job(random: Random, before: list[Job]) -> Job:
    prompt = list(random.choice(PREFIXES)) + [random.randint(0, 5) for _ in range(random.randint(1, 20))]
    adapter = random.randint(0, 1) if random.random() < 0.2 else 0
    arrival = random.randint(0, 12)
    if before and random.random() < 0.3:
        other = random.choice(before)
        prompt, adapter, arrival = list(other.prompt), other.adapter, other.arrival + random.randint(0, 30)
        if random.random() < 0.5:
            answer = other.answer(4096)
            prompt += answer[: random.randint(0, len(answer))]
            prompt.append(random.randint(0, 5))
    return Job(
        prompt[:LONGEST_PROMPT],
        random.randint(1, LONGEST_ANSWER),
        arrival,
        random.random() < 0.5,
        random.choice([(), (0,), (1, 2)]),
        arrival + random.randint(0, 20) if random.random() < 0.2 else None,
        adapter,
    )
