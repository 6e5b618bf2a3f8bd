"""The steps that our own predictions are held against: built right, timed whatever they hold, compared by name."""

from __future__ import annotations

import json

import pytest
from predict.priced import config

from benchmarks.accuracy.own import STEPS, Own, compare, measure, options
from firstlight.config import EngineOptions
from firstlight.engine.engine import Engine


def test_a_step_holds_what_it_says(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3_5_moe_text")))
    engine = Engine(
        EngineOptions(
            model=str(tmp_path / "config.json"), weights="random", device="cpu", max_context=256, max_running=8,
            step_tokens=64, cache_gib=0.01, prefix_cache=False,
        )
    )  # fmt: skip
    steps = (Own(2, 40), Own(prompts=2, new=16), Own(prompts=1, new=8, before=100), Own(3, 20, 1, 32))
    rows = measure(engine, steps)
    engine.close()
    assert [row["ms"] > 0 for row in rows] == [True] * 4
    assert all(0 < row["experts"] <= 1 for row in rows)


def test_every_step_fits_the_engine_that_measures_it():
    given = options()
    assert len(STEPS) == 20
    assert max(step.rows for step in STEPS) <= given.max_running
    assert max(step.longest for step in STEPS) < given.max_context
    assert max(step.tokens for step in STEPS) <= given.step_tokens
    assert {"decode", "prefill", "mixed"} == {
        "mixed" if step.decode and step.prompts else "decode" if step.decode else "prefill" for step in STEPS
    }


def row(decode, ms, experts=0.5):
    place = {"decode": decode, "context": 9, "prompts": 0, "new": 0, "before": 0}
    return {**place, "ms": ms, "low_ms": 1.0, "high_ms": 9.0, "experts": experts}


def test_errors_are_of_the_same_step_and_routing(capsys):
    predicted = {"steps": [row(1, 2.0), row(2, 3.3), row(3, 7.0)]}
    assert compare(predicted, {"steps": [row(2, 3.0), row(1, 2.0)]}) == pytest.approx(0.05)
    assert compare(predicted, {"steps": [row(2, 3.0), row(1, 9.0, experts=0.3)]}) == pytest.approx(0.1)
    assert "doesn't count: 30% of the experts met, not 50%" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no step"):
        compare(predicted, {"steps": []})
