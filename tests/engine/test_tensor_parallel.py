"""TP2 = TP1: two real processes over gloo give the tokens of one."""

from __future__ import annotations

import pytest
from driver import answer, engine, prompts
from reference import save_checkpoint

from firstlight.engine.ranks import decode_plan, encode_plan


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3"]
)
def test_two_ranks_give_the_tokens_of_one(name, tmp_path):
    checkpoint = save_checkpoint(name, tmp_path)
    alone = answer(engine(checkpoint), prompts())
    both = engine(checkpoint, tensor_parallel=2, step_tokens=48)
    try:
        assert answer(both, prompts()) == alone
        assert answer(both, prompts()) == alone  # from the cache
    finally:
        both.close()


def test_a_model_that_cannot_be_split_says_so(tmp_path):
    checkpoint = save_checkpoint("smollm2", tmp_path)
    with pytest.raises(ValueError, match=r"attention heads: 3 units of 1 can't be split evenly over 2 tp ranks"):
        engine(checkpoint, tensor_parallel=2)


def test_plans_survive_the_way_to_another_rank(tmp_path):
    running = engine(save_checkpoint("qwen3_5_text", tmp_path), step_tokens=70)
    seen = []
    execute = running.executor.execute

    def watch(plan):
        seen.append(plan)
        return execute(decode_plan(encode_plan(plan)))

    watched = engine(tmp_path, step_tokens=70)
    running.executor.execute = watch  # type: ignore[method-assign]
    assert answer(running, prompts()) == answer(watched, prompts())
    assert any(plan.exports for plan in seen)
    assert any(plan.joins for plan in seen)
