"""A step op by op: every op is there, what is asked too much is refused, and times add up roughly."""

from __future__ import annotations

import json

import pytest
from driver import engine
from reference import save_checkpoint

from firstlight.calibrate.profile import profile
from firstlight.calibrate.profile_report import profile_json
from firstlight.errors import FirstlightError


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    return engine(save_checkpoint("qwen3_5_moe", tmp_path_factory.mktemp("model")), max_running=4, step_tokens=128)


def test_every_call_of_a_mixed_step_is_on_a_line(running) -> None:
    made = profile(running, batch=3, context=100, prefill=50)
    assert made.tokens == 53
    assert not made.captured
    layers = running.loaded.model.config.layer_types
    by_place = {(line.op, line.where.rsplit(".", 1)[-1]): line for line in made.lines}
    assert by_place["attention", "decode"].count == by_place["attention", "prefill"].count
    assert by_place["attention", "prefill"].count == layers.count("full_attention")
    assert by_place["gated_delta", "decode"].count == layers.count("linear_attention")
    assert {"step_inputs", "sample", "advance_rows", "embedding", "moe"} <= {line.op for line in made.lines}
    assert sum(line.count for line in made.lines if line.op == "moe") == len(layers)
    assert all(line.seconds > 0 and line.provider for line in made.lines)
    assert made.total == pytest.approx(sum(line.seconds * line.count for line in made.lines))
    assert json.loads(profile_json(made))["tokens"] == 53


def test_the_engine_serves_as_before_afterwards(running) -> None:
    from driver import answer, prompts

    fresh = engine(running.options.model, max_running=4, step_tokens=128)
    assert answer(running, prompts()) == answer(fresh, prompts())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch": 0, "context": 10}, "empty step"),
        ({"batch": 9, "context": 10}, "--max-running"),
        ({"batch": 4, "context": 10, "prefill": 3}, "--max-running"),
        ({"batch": 1, "context": 10, "prefill": 1000}, "--step-tokens"),
        ({"batch": 1, "context": 10**6}, "--max-context"),
    ],
)
def test_what_does_not_fit_is_said(running, asked, message) -> None:
    with pytest.raises(FirstlightError, match=message):
        profile(running, **asked)
