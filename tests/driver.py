"""Drive an engine in a test: submit requests, step until all are done, check that nothing leaked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firstlight.cache import page_bytes, slot_bytes
from firstlight.config import EngineOptions
from firstlight.engine.engine import Engine
from firstlight.models import build_model
from firstlight.nn.module import caches
from firstlight.scheduling.request import Request
from firstlight.scheduling.sampling import SamplingParams, ServiceClass

PROMPT_LENGTHS = (1, 10, 75, 130, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "chunks of 1": {"step_tokens": 1, "max_running": 1},
    "chunks of 7": {"step_tokens": 7, "max_running": 2},
    "chunks of 16": {"step_tokens": 16, "max_running": 4},
    "chunks of 64": {"step_tokens": 64},
    "one at a time": {"max_running": 1},
    "no prefix cache": {"prefix_cache": False},
    "two plans in flight": {"depth": 2},
    "pages of 1": {"page_size": 1},
    "pages of 64": {"page_size": 64},
    "one provider for all buckets": {"invariant": True},
}
"""Options that change how steps are made up, and no answer."""


def engine(checkpoint: Path, **options: Any) -> Engine:
    """A float32 engine with a small cache whose unused memory is NaN."""
    given = {"dtype": "float32", "cache_gib": 0.02, "device": "cpu", **options}
    return Engine(EngineOptions(model=str(checkpoint), **given), poison=True)


def small_cache(
    checkpoint: Path,
    pages: int,
    live: int,
    checkpoints: int = 2,
    page_size: int = 16,
    cache_dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Options that give a cache of about so many pages, live slots and checkpoint slots."""
    config = json.loads((checkpoint / "config.json").read_text())
    specs = list(caches(build_model(config, dtype=torch.float32, cache_dtype=cache_dtype)).values())
    page, slot = page_bytes(specs, page_size), slot_bytes(specs)
    left = max((live + 1) * slot + (pages + 1) * page, 2 * (live + 1) * slot)
    kept = checkpoints * slot
    return {
        "cache_gib": (left + kept) / 2**30,
        "checkpoint_gib": kept / 2**30,
        "max_running": live,
        "page_size": page_size,
    }


def prompts(lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 5) -> list[list[int]]:
    """Random prompts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 480, (length,), generator=generator).tolist() for length in lengths]


def request(
    name: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, service: ServiceClass = ServiceClass.ONLINE
) -> Request:
    """A request on token ids."""
    return Request(name, np.array(prompt, np.int32), sampling, service)


def drain(running: Engine) -> dict[str, list[int]]:
    """Step until there is no work; the tokens of each request. Checks that all pages and slots are back."""
    answers: dict[str, list[int]] = {}
    while running.has_work():
        for delta in running.step():
            answers.setdefault(delta.id, []).extend(delta.tokens)
    running.scheduler.check_integrity()
    return answers


def answer(running: Engine, all_prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """The answers to prompts submitted at once."""
    for i, prompt in enumerate(all_prompts):
        running.add(request(f"r{i}", prompt, sampling))
    answers = drain(running)
    return [answers[f"r{i}"] for i in range(len(all_prompts))]


def answer_arrivals(running: Engine, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """Answers to `prompts()` that arrive while others decode; twice, so that the second time prefixes are found."""
    answers: dict[str, list[int]] = {}
    for turn in range(2):
        for i, prompt in enumerate(prompts()):
            running.add(request(f"{turn}.{i}", prompt, sampling))
            for _ in range(2):
                for delta in running.step():
                    answers.setdefault(delta.id, []).extend(delta.tokens)
        for name, tokens in drain(running).items():
            answers.setdefault(name, []).extend(tokens)
    return [answers[f"{turn}.{i}"] for turn in range(2) for i in range(len(prompts()))]


def reference_answer(reference: Any, prompt: Sequence[int], new: int = 16) -> list[int]:
    """transformers' greedy tokens."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    out = reference.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()
