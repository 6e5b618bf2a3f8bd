"""On a GPU, products that no kernel serves are said at start."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CHANNELS

from firstlight.engine.fallbacks import warn_of_references
from firstlight.hardware import CPU_GENERIC, Hardware
from firstlight.hardware.gpus import GPUS
from firstlight.models import build_model
from firstlight.models.walk import bind_model
from firstlight.quant import scheme_of
from firstlight.step import Bucket

CONFIG = Path(__file__).parents[1] / "configs" / "Qwen3.5-35B-A3B-FP8.json"
H200 = replace(GPUS["h200"], features=GPUS["h200"].features | {"triton"})


def warnings_of(
    caplog: pytest.LogCaptureFixture, hardware: Hardware, quantization: Any = None, **changes: int
) -> list[str]:
    """quantization: in place of the config's own, which has scales of blocks. changes: of its text fields."""
    config = json.loads(CONFIG.read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    text = config["text_config"]
    config["text_config"] = text | {"num_hidden_layers": 4, "layer_types": text["layer_types"][:4]} | changes
    model = build_model(config, dtype=torch.bfloat16, scheme=scheme_of(config, torch.bfloat16))
    bind_model(model, [Bucket(0, 1, 1, 1, 4096, 1), Bucket(1, 64, 64, 1, 4096, 64)], hardware)
    with caplog.at_level(logging.WARNING):
        warn_of_references(model, hardware)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("quantization", [None, CHANNELS], ids=["blocks", "channels"])
def test_nothing_is_said_where_kernels_serve(caplog: pytest.LogCaptureFixture, quantization: Any) -> None:
    assert warnings_of(caplog, H200, quantization) == []


def test_experts_that_nobody_reads_are_named_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    [said] = warnings_of(caplog, H200, CHANNELS, moe_intermediate_size=192)
    assert "experts at layers.*.mlp.mixture: no kernel serves it" in said
    assert "intermediate size 192 must be multiples of 128" in said


def test_a_cpu_has_no_kernels_to_miss(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, CPU_GENERIC, CHANNELS) == []
