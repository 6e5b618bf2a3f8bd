"""Tables that come with the package name ops and providers that exist, and decide what they were made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.config import EngineOptions
from firstlight.engine.loading import bind_only
from firstlight.hardware import GPUS
from firstlight.hardware.calibration import CALIBRATED, read_table
from firstlight.ops.binding import PARTS
from firstlight.ops.op import REFERENCE, REGISTRY, sites

CONFIGS = Path(__file__).parents[1] / "configs"
TABLES = sorted(CALIBRATED.glob("*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_ops_and_providers_exist(path):
    for group in read_table(path).groups:
        assert group.op in REGISTRY
        known = {REFERENCE, *([PARTS] if REGISTRY[group.op].parts else []), *REGISTRY[group.op].providers}
        assert group.provider in known, group.op
        assert group.rows or group.refused


@pytest.mark.skipif(not (CALIBRATED / "h200.json").exists(), reason="no table of an H200 comes with this version")
def test_the_h200_table_decides_for_the_model_it_was_made_for():
    options = EngineOptions(
        model=str(CONFIGS / "Qwen3.5-35B-A3B-FP8.json"), weights="random", device="cpu", max_running=32, step_tokens=512,
        max_context=8192,
    )  # fmt: skip
    bound = bind_only(options, hardware=GPUS["h200"])
    found = dict(sites(bound.model))
    for name in (
        "layers.0.mixer.in_proj_qkvz.product", "layers.0.mixer.mix.decode", "layers.3.mixer.attend.decode",
        "layers.0.mlp.mixture", "layers.1.input_layernorm.add_norm", "lm_head.product",
    ):  # fmt: skip
        assert all(choice.seconds for choice in found[name].choices[:6]), name
