"""Costs of a walked model: exact at shapes that were never walked, and those of the ops themselves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from predict.priced import config, priced

from firstlight.models import walk as models_walk
from firstlight.models.walk import meta_step, walk
from firstlight.ops.op import NO_COST, Shape
from firstlight.predict import walk as predict_walk
from firstlight.predict.layout import Layout, build
from firstlight.predict.shape import StepShape
from firstlight.predict.step_time import StepModel
from firstlight.predict.walk import VARIABLES, walk_model
from firstlight.step import Bucket

FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "deepseek_v3", "kimi_linear")


def walked_at(model, decode, prefill, context):
    """Sum of all ops' own costs in one walk of the whole model at a mixed step of even rows."""
    (rows, query), (prompts, length) = decode, prefill
    tokens = rows * query + prompts * length
    bucket = Bucket(0, tokens, rows + prompts, max(length, query), context, rows * query + prompts)
    step = replace(meta_step(model, bucket, decode_requests=rows, page_size=16), decode_tokens=rows * query)
    total = NO_COST
    parts = {"decode": StepShape.of_decode(rows, context, query).decode}
    parts["prefill"] = StepShape.of_prefill(prompts, length, context - length).prefill
    whole = parts["decode"] + parts["prefill"]

    def observe(bound, args, kwargs):
        nonlocal total
        part = parts.get(bound.label, whole)
        shape = Shape(float(part.tokens), float(part.requests), float(part.keys), float(part.pairs), 0.375)
        total = total + bound.op.cost(shape, *args, **kwargs)
        return bound.op.abstract(*args, **kwargs)

    walk(model, step, observe)
    return total


@pytest.mark.parametrize("name", FAMILIES)
def test_coefficients_give_the_costs_of_a_walk_anywhere(name):
    model = build(config(name), Layout())
    walked = walk_model(model)
    rows, query, prompts, length, context = 11, 2, 3, 320, 777
    decode = StepShape.of_decode(rows, context, query)
    shape = decode + StepShape.of_prefill(prompts, length, context - length)
    want = walked_at(model, (rows, query), (prompts, length), context)
    got = {"read": 0.0, "written": 0.0, "flops": 0.0, "launches": 0.0}
    for call in walked.calls:
        part = shape.part(call.label)
        values = dict.fromkeys(VARIABLES, 0.0)
        values |= {
            "one": 1.0, "decode_tokens": shape.decode.tokens, "decode_requests": shape.decode.requests,
            "prefill_tokens": shape.prefill.tokens, "prefill_requests": shape.prefill.requests,
            "logits": shape.logits, "keys": part.keys, "pairs": part.pairs, "distinct": 0.375, "longest": length,
        }  # fmt: skip
        vector = np.array([float(values[variable]) for variable in VARIABLES])
        for figure, coefficients in call.cost.items():
            key = figure.partition(":")[0]
            if key in got:
                got[key] += call.count * float(coefficients @ vector)
    assert got["read"] == pytest.approx(want.read, rel=1e-9)
    assert got["written"] == pytest.approx(want.written, rel=1e-9)
    assert got["flops"] == pytest.approx(sum(want.flops.values()), rel=1e-9)
    assert got["launches"] == pytest.approx(want.launches, rel=1e-9)


def test_layers_that_agree_are_walked_once_and_counted():
    calls = walk_model(build(config("Qwen3.5-35B-A3B"), Layout())).calls
    attention = [call for call in calls if call.op == "attention" and call.label == "decode"]
    assert sum(call.count for call in attention) == 10
    assert sum(call.count for call in calls if call.op == "experts") == 40
    assert len({call.path.split(".")[1] for call in calls if call.path.startswith("layers.")}) == 3


def test_layers_that_agree_cost_one_walk_together(monkeypatch):
    """All layers are walked once; every other walk, one for each sum that is moved, is of a layer of each kind."""
    walks = []

    def counting(model, step, observer):
        walks.append(0)

        def observe(*call):
            walks[-1] += 1
            return observer(*call)

        return walk(model, step, observe)

    for module in (models_walk, predict_walk):
        monkeypatch.setattr(module, "walk", counting)
    walk_model(build(config("Qwen3.5-397B-A17B"), Layout()))
    whole, *others = walks
    assert others
    assert max(others) < whole / 10


def test_any_number_of_shapes_is_priced_in_one_pass_over_the_kernels(monkeypatch):
    steps, count = priced("Qwen3.5-397B-A17B"), 0
    price = StepModel._item

    def counting(*args):
        nonlocal count
        count += 1
        return price(*args)

    monkeypatch.setattr(StepModel, "_item", counting)
    passes = []
    for shapes in (1, 2000):
        context = np.arange(1000, 1000 + shapes)
        steps.time(StepShape.of_decode(np.full(shapes, 64), context) + StepShape.of_prefill(np.ones(shapes), context))
        passes, count = [*passes, count], 0
    assert passes[0] == passes[1] > 0


def test_a_walk_loads_no_compiler():
    """On the meta device many functions of torch go through Python, and its compiler and sympy: a second, the first time."""
    path = Path(__file__).parents[1] / "configs"
    program = f"""
import json, sys
from pathlib import Path
from firstlight.predict.layout import Layout, build
from firstlight.predict.walk import walk_model
for name in ("Qwen3.5-397B-A17B", "DeepSeek-V3.2", "gpt-oss-120b", "Kimi-Linear-48B-A3B", "Qwen3-8B"):
    walk_model(build(json.loads(Path(f"{path}/{{name}}.json").read_text()), Layout()))
assert not {{"torch._dynamo", "sympy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_split_over_ranks_divides_weights_and_adds_collectives():
    whole, half = (walk_model(build(config("Qwen3-8B"), Layout(tensor_parallel=n))).calls for n in (1, 2))

    def weights(calls):
        return sum(call.count * call.cost["read"][0] for call in calls if call.op == "linear")

    assert weights(half) == pytest.approx(weights(whole) / 2, rel=1e-3)
    assert not any(call.cost["messages"].any() for call in whole)
    assert sum(call.count for call in half if call.op == "all_reduce") == 2 * 36 + 1


def test_walking_leaves_the_model_as_it_was():
    model = build(config("qwen3_next"), Layout())
    layers = list(model.layers)
    walk_model(model)
    assert list(model.layers) == layers
    assert all(isinstance(weight, torch.Tensor) for weight in (model.norm.weight, model.embed_tokens.weight))
