"""Our own kernels, priced from a calibrated table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from predict.priced import config

from firstlight.cli.explain import command
from firstlight.hardware import GPUS
from firstlight.hardware.calibration import read_table
from firstlight.ops.binding import PARTS
from firstlight.ops.op import REFERENCE
from firstlight.predict.layout import Layout, build, step_model
from firstlight.predict.shape import StepShape
from firstlight.predict.step_time import Conditions
from firstlight.step import Bucket

CONFIGS = Path(__file__).parents[1] / "configs"
NAME = "Qwen3.5-35B-A3B-FP8"
DECODE = Bucket(0, 64, 64, 1, 40000, 64)
START, EFFICIENCY = 3e-6, 0.8


@pytest.fixture(scope="module")
def bound():
    return step_model(build(config(NAME), Layout()), GPUS["h200"], Layout(), Conditions(tuned=False), bucket=DECODE)


def rows_of(kernel, steps):
    """Rows that a kernel with a start and an even efficiency would have; at sizes that the tests don't ask for."""
    rows = []
    for requests in (1, 4, 16, 64, 256):
        for context in (512, 4096, 32768) if kernel.label == "decode" else (1,):
            shape = StepShape.of_decode(requests, context)
            item = next(item for item in steps.time(shape).kernels if item.kernel is kernel)
            seconds = START + float(item.floor[0]) / item.kernel.count / EFFICIENCY
            step = {"tokens": requests, "requests": requests, "query": 1, "context": context}
            rows.append([*(step if kernel.label == "decode" else {"tokens": requests}).values(), seconds * 1e6])
    return rows


@pytest.fixture(scope="module")
def table(bound, tmp_path_factory):
    groups = []
    for kernel, _ in bound._kernels:
        if kernel.call and kernel.provider not in (PARTS, REFERENCE):
            axes = ["tokens", "requests", "query", "context"] if kernel.label == "decode" else ["tokens"]
            groups.append(
                {"op": kernel.call, "label": kernel.label, "provider": kernel.provider, "format": kernel.sizes.format,
                 "dtype": kernel.sizes.dtype, "source": "made up", "fixed": dict(kernel.sizes.fixed), "axes": axes,
                 "rows": rows_of(kernel, bound)}
            )  # fmt: skip
    unique = {json.dumps([g["op"], g["label"], g["provider"], g["fixed"], g["format"], g["dtype"]]): g for g in groups}
    path = tmp_path_factory.mktemp("table") / "h200.json"
    path.write_text(json.dumps({"gpu": "h200", "groups": list(unique.values())}))
    return read_table(path)


def test_calls_between_the_rows_take_what_their_law_says(table):
    model = build(config(NAME), Layout())
    steps = step_model(model, GPUS["h200"], Layout(), Conditions(tuned=False), bucket=DECODE, table=table)
    step = steps.time(StepShape.of_decode(np.array([2, 8, 32]), np.array([1000, 9000, 3000])))
    own = [item for item in step.kernels if item.source.endswith("on h200") and item.kernel.provider in item.source]
    assert len(own) >= 8
    # Whole calls were timed: what runs beside products (sorting, quantising) isn't counted twice.
    assert not {"quantise", "around experts"} & {item.kernel.name for item in step.kernels}
    assert sum(item.seconds for item in own).sum() > 0.9 * sum(item.seconds for item in step.kernels).sum()
    for item in own:
        want = START * item.kernel.count + item.floor / EFFICIENCY
        np.testing.assert_allclose(item.seconds, want, rtol=0.06, err_msg=item.kernel.name)
        assert item.origin == "interpolated"
        assert np.all(item.seconds >= item.floor)


def test_the_command_prices_bound_providers_by_its_table(table, capsys):
    shown = {}
    for option in (table.path, "none"):
        command(model=str(CONFIGS / f"{NAME}.json"), table=option, batch=64, bound=True, what_if=False)
        shown[option] = capsys.readouterr().out
    assert "on h200: " in shown[table.path]
    assert shown[table.path] != shown["none"]


def test_rows_of_others_say_nothing_of_ours(table):
    """A table of another model's sizes changes nothing."""
    other = build(config("Qwen3-8B"), Layout())
    with_table, without = (
        step_model(other, GPUS["h200"], Layout(), Conditions(tuned=False), bucket=DECODE, table=found)
        for found in (table, None)
    )
    shape = StepShape.of_decode(8, 2000)
    kept = [item for item in with_table.time(shape).kernels if item.kernel.op in ("linear", "attention")]
    want = [item for item in without.time(shape).kernels if item.kernel.op in ("linear", "attention")]
    assert [float(item.seconds[0]) for item in kept] == [float(item.seconds[0]) for item in want]
