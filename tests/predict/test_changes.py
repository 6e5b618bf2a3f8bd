"""What-if switches change what they say, and no more."""

from __future__ import annotations

import pytest
from predict.priced import config, priced

from firstlight.hardware import GPUS
from firstlight.predict.layout import Layout, build, step_model
from firstlight.predict.shape import StepShape
from firstlight.predict.step_time import Conditions
from firstlight.predict.what_if import changes


def moved(steps, shape, op):
    return sum(float(item.moved[0]) for item in steps.time(shape).kernels if item.kernel.op == op)


def test_a_smaller_cache_and_state_halve_what_they_hold():
    shape = StepShape.of_decode(64, 8192)
    plain, small = (
        priced("Qwen3.5-35B-A3B"),
        priced("Qwen3.5-35B-A3B", layout=Layout(float8_cache=True, bfloat16_state=True)),
    )
    assert moved(small, shape, "attention") == pytest.approx(moved(plain, shape, "attention") / 2, rel=0.01)
    assert moved(small, shape, "gated_delta_rule") == pytest.approx(
        moved(plain, shape, "gated_delta_rule") / 2, rel=0.05
    )
    assert moved(small, shape, "experts") == moved(plain, shape, "experts")


def test_every_change_that_applies_is_priced():
    layout, shape = Layout(), StepShape.of_decode(64, 8192)
    raw = config("Qwen3.5-35B-A3B")
    model = build(raw, layout)
    found = {change.name: change for change in changes(raw, model, priced("Qwen3.5-35B-A3B"), layout, shape)}
    assert {"FP8 weights", "FP8 head", "FP8 KV cache", "bfloat16 state", "tensor parallel over 2 GPUs"} <= set(found)
    now = float(priced("Qwen3.5-35B-A3B").time(shape).seconds[0])
    assert all(change.seconds < now for change in found.values())
    assert not found["tensor parallel over 2 GPUs"].lossy


def test_a_checkpoint_in_fp8_is_not_offered_fp8_weights():
    layout, raw = Layout(), config("Qwen3-30B-A3B-FP8")
    names = [
        c.name
        for c in changes(raw, build(raw, layout), priced("Qwen3-30B-A3B-FP8"), layout, StepShape.of_decode(1, 99))
    ]
    assert "FP8 weights" not in names


def test_overlap_hides_what_is_sent_and_nothing_else():
    layout = Layout(data_parallel=16, expert_parallel=16)
    model, gpu = build(config("Qwen3-30B-A3B-FP8"), layout), GPUS["h800"]
    apart = step_model(model, gpu, layout)
    together = step_model(model, gpu, layout, Conditions(two_batch_overlap=True))
    shape = StepShape.of_decode(512, 4096)
    step = together.time(shape)
    sent = sum(float(item.seconds[0]) for item in step.kernels if item.kernel.kind in ("dispatch", "combine"))
    assert 0 < float(step.hidden[0]) <= sent
    assert float(apart.time(shape).hidden[0]) == 0


def test_skewed_routing_reads_fewer_experts():
    layout = Layout()
    model = build(config("Qwen3.5-35B-A3B"), layout)
    skewed = step_model(model, GPUS["h200"], layout, Conditions(skew=1.2))
    shape = StepShape.of_decode(16, 4096)
    assert moved(skewed, shape, "experts") < moved(priced("Qwen3.5-35B-A3B"), shape, "experts")
