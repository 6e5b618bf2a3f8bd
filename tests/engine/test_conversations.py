"""Conversations over one system prompt: what was computed once is not computed again, hybrids included."""

from __future__ import annotations

import numpy as np
import pytest
from driver import engine, prompts, request
from reference import save_checkpoint

from firstlight.scheduling.sampling import SamplingParams

CONVERSATIONS, TURNS, SYSTEM = 20, 8, 600


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "qwen3_next"])
def test_twenty_conversations_prefill_little_more_than_the_ideal(name, tmp_path):
    """Ideal: the system prompt once, each user message once, and each answer's last token, which was never run."""
    running = engine(save_checkpoint(name, tmp_path), cache_gib=0.5, checkpoint_gib=0.2)
    generator = np.random.default_rng(3)
    system = prompts((SYSTEM,), seed=100)[0]
    histories = [list(system) for _ in range(CONVERSATIONS)]
    ideal = SYSTEM
    cached: dict[str, int] = {}
    for turn in range(TURNS):
        for i, history in enumerate(histories):
            message = prompts((int(generator.integers(8, 60)),), seed=1000 + turn * CONVERSATIONS + i)[0]
            ideal += len(message) + (turn > 0)
            history += message
            running.add(request(f"c{i}t{turn}", history, SamplingParams(temperature=0, max_tokens=12)))
        before = [len(history) for history in histories]
        while running.has_work():
            for delta in running.step():
                number = int(delta.id[1 : delta.id.index("t")])
                histories[number] += delta.tokens
                cached[delta.id] = max(cached.get(delta.id, 0), delta.cached_tokens)
        assert all(len(history) == start + 12 for history, start in zip(histories, before, strict=True))
    running.scheduler.check_integrity()
    metrics = running.scheduler.metrics
    print(f"{name}: prefilled {metrics.prefilled_tokens}, ideal {ideal}, ratio {metrics.prefilled_tokens / ideal:.3f}")
    assert metrics.prefilled_tokens <= 1.1 * ideal
    assert sum(cached.values()) == metrics.matched_tokens
    assert running.geometry.checkpoint_slots * running.geometry.slot_bytes <= 0.2 * 2**30 or name == "qwen3"
