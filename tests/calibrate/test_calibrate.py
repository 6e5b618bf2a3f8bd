"""A calibration on the CPU: who is measured, who is refused and why, and what the chooser makes of the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from firstlight.calibrate import sweep, timing
from firstlight.calibrate.report import failures
from firstlight.calibrate.run import calibrate, table_text
from firstlight.calibrate.workload import StepShape, layer_kinds, step_shapes
from firstlight.config import EngineOptions
from firstlight.engine.loading import bind_only
from firstlight.errors import FirstlightError
from firstlight.hardware.calibration import read_table
from firstlight.models import build_model
from firstlight.ops.linear import linear
from firstlight.ops.op import sites
from firstlight.ops.silu_mul import silu_mul

TINY = Path(__file__).parents[1] / "tiny_configs"


def options(name="qwen3_5_moe_text", **more):
    return EngineOptions(
        model=str(TINY / f"{name}.json"), weights="random", device="cpu", max_running=2, step_tokens=64, max_context=96,
        **more,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Timings that need not be good; on a busy machine nothing is too slow to be timed."""
    monkeypatch.setattr(sweep, "SLOW_REFERENCE", 60.0)
    monkeypatch.setattr(timing, "CPU_SECONDS", 1e-4)
    monkeypatch.setattr(timing, "REPLAYS", 2)


@pytest.fixture
def extra():
    """Providers of `silu_mul` for a test, forgotten afterwards."""
    kept = dict(silu_mul.providers)
    yield silu_mul.provide
    silu_mul.providers.clear()
    silu_mul.providers.update(kept)


def loses_a_row(x):
    result = silu_mul.body(x)
    result[-1] = 0
    return result


def breaks(x):
    raise RuntimeError("no such instruction")


def test_a_provider_that_is_wrong_is_refused_with_the_reason_and_never_chosen(extra, tmp_path):
    extra("right", silu_mul.body, rank=1)
    extra("wrong", loses_a_row, rank=9)
    extra("broken", breaks, rank=8)
    extra("unwilling", silu_mul.body, when=lambda call: "not today", rank=7)
    made = calibrate(options("llama"), only=["silu_mul"])
    by_name = {result.provider: result for result in made.results}
    assert set(by_name) == {"right", "wrong", "broken"}
    assert by_name["right"].seconds > 0
    assert not by_name["right"].reason
    assert "differs from the reference" in by_name["wrong"].reason
    assert by_name["broken"].reason == "RuntimeError: no such instruction"
    assert any("refused: broken of silu_mul" in line for line in failures(made.results))

    path = tmp_path / "table.json"
    path.write_text(table_text(made.table))
    bound = bind_only(options("llama", table=str(path)))
    (choices,) = {tuple(site.choices) for name, site in sites(bound.model) if name == "layers.0.mlp.activation"}
    assert {choice.provider for choice in choices} == {"right"}
    assert all(choice.seconds > 0 for choice in choices)
    assert "failed when it was measured" in dict(choices[0].refused)["wrong"]
    by_rank = bind_only(options("llama", table="none"))
    assert dict(sites(by_rank.model))["layers.0.mlp.activation"].choices[0].provider == "wrong"


def test_lossy_providers_are_measured_but_not_chosen(extra, tmp_path):
    extra("right", silu_mul.body)
    extra("rough", lambda x: silu_mul.body(x), lossy="nothing, really", rank=9)
    made = calibrate(options("llama"), only=["silu_mul"])
    assert {result.provider for result in made.results} == {"right", "rough"}
    path = tmp_path / "table.json"
    path.write_text(table_text(made.table))
    bound = bind_only(options("llama", table=str(path)))
    assert dict(sites(bound.model))["layers.0.mlp.activation"].choices[0].provider == "right"


def test_every_op_of_a_hybrid_mixture_is_measured_as_it_will_be_bound(tmp_path):
    """The keys of calibration are those of binding: what several providers can serve is chosen by time."""
    made = calibrate(options())
    assert not list(failures(made.results))
    measured = {(result.op, result.label, result.provider) for result in made.results}
    assert ("gated_delta_rule", "decode", "torch_decode") in measured
    assert ("gated_delta_rule", "decode", "torch_in_place") in measured
    assert ("attention", "prefill", "torch_sdpa") in measured
    assert ("sample", "", "torch_cpu") in measured
    assert ("moe", "", "parts") in measured
    assert {r.sizes.step["tokens"] for r in made.results if r.op == "linear"} >= {1, 2, 64}

    path = tmp_path / "table.json"
    path.write_text(table_text(made.table))
    table = read_table(path)
    assert table.versions["torch"] == torch.__version__
    bound = bind_only(options(table=str(path)))
    found = {name: site.choices for name, site in sites(bound.model)}
    for name in ("layers.0.mixer.in_proj_qkvz.product", "layers.3.mixer.attend.decode", "layers.3.mlp.mixture"):
        assert found[name][0].seconds > 0, name
    decode = found["layers.0.mixer.mix.decode"][0]
    rule = next(part for part in decode.parts if part.op == "gated_delta_rule")
    assert rule.seconds > 0
    assert rule.runner_up is not None
    assert rule.seconds <= rule.runner_up[1]


def test_a_short_time_leaves_steps_out():
    made = calibrate(options("llama"), seconds=0.0)
    assert not made.results
    assert len(made.left_out) >= 3


def test_a_table_is_short_and_its_groups_are_lines():
    made = calibrate(options("llama"), only=["linear"])
    text = table_text(made.table)
    content = json.loads(text)
    assert len(text.splitlines()) == len(content["groups"]) + len(content) + 3
    (group,) = [g for g in content["groups"] if g["fixed"] == {"columns": 128, "rows": 512}]
    assert group["provider"] == "torch"
    assert group["axes"] == ["tokens"]


def test_layers_that_make_the_same_calls_are_measured_once():
    config = json.loads((TINY / "qwen3_5_moe_text.json").read_text())
    assert layer_kinds(build_model(config, dtype=torch.float32), 16) == [0, 3]


def test_steps_keep_within_rows_tokens_context_and_cache():
    shapes = step_shapes(48, 2048, 40000, 200_000)
    assert StepShape(1, 1, 4096) in shapes
    assert StepShape(48, 1, 4096) in shapes
    assert StepShape(1, 2048, 2048) in shapes
    assert StepShape(8, 256, 256) in shapes
    assert StepShape(1, 2048, 32768) in shapes
    assert all(shape.requests * shape.context <= 200_000 for shape in shapes)
    assert all(shape.tokens <= 2048 and shape.requests <= 48 for shape in shapes)
    assert len(shapes) == len(set(shapes))
    assert all(shape.context <= 512 for shape in step_shapes(4, 128, 512, 10_000))
    for tokens in (1_000, 5_461, 87_376):  # whole pages, however a request's share of the tokens falls
        pages = tokens // 16
        small = step_shapes(64, 2048, 40000, tokens, 16)
        assert small
        assert all(shape.requests * -(-shape.context // 16) <= pages for shape in small)


def test_one_rank_only():
    with pytest.raises(FirstlightError, match="--tensor-parallel"):
        calibrate(options("llama").model_copy(update={"tensor_parallel": 2}))


def test_measuring_leaves_the_ops_as_they_were():
    before = {name: provider.run for name, provider in linear.providers.items()}
    calibrate(options("llama"), only=["linear"])
    assert {name: provider.run for name, provider in linear.providers.items()} == before
