"""FP8 weights are bound for the FP8 that a GPU multiplies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import CHANNELS

from firstlight.hardware import GPUS
from firstlight.models import build_model
from firstlight.models.walk import bind_model
from firstlight.ops.op import sites
from firstlight.quant import scheme_of
from firstlight.quant.fnuz import E4M3FNUZ
from firstlight.step import Bucket

CONFIG = Path(__file__).parents[1] / "configs" / "Qwen3.5-35B-A3B-FP8.json"
BUCKETS = [Bucket(0, 1, 1, 1, 4096, 1), Bucket(1, 64, 64, 1, 4096, 64), Bucket(2, 2048, 64, 2048, 4096, 64)]


@pytest.mark.parametrize(("name", "converted"), [("mi300x", True), ("mi355x", False), ("h200", False)])
def test_layout_and_providers_of_each_gpu(name, converted):
    """All FP8 products of a hybrid mixture: on gfx942 every weight is converted, and every bucket has fast providers."""
    config = json.loads(CONFIG.read_text())
    model = build_model(config, dtype=torch.bfloat16, scheme=scheme_of(config, torch.bfloat16))
    hardware = replace(GPUS[name], features=GPUS[name].features | {"triton"})
    _, layouts = bind_model(model, BUCKETS, hardware)
    assert set(layouts.values()) == ({E4M3FNUZ.name} if converted else set())
    suffix = "_fnuz" if converted else ""
    bound = {path: [choice.provider for choice in site.choices] for path, site in sites(model)}
    mixtures = {tuple(providers) for path, providers in bound.items() if path.endswith("mixture")}
    many = "hopper_grouped" if name == "h200" else "triton_grouped" + suffix
    assert mixtures == {("triton_few" + suffix, "triton_grouped" + suffix, many)}
    qkvz = {tuple(providers[:2]) for path, providers in bound.items() if path.endswith("in_proj_qkvz.product")}
    assert qkvz == {("triton_skinny" + suffix, "triton_block_fp8" + suffix)}


@pytest.mark.parametrize(("name", "converted"), [("mi300x", True), ("mi355x", False), ("h200", False)])
def test_scales_by_channel_on_each_gpu(name, converted):
    """The same with a scale a row: Hopper's own experts, which read blocks, leave many tokens to Triton's."""
    config = json.loads(CONFIG.read_text()) | {"quantization_config": CHANNELS}
    model = build_model(config, dtype=torch.bfloat16, scheme=scheme_of(config, torch.bfloat16))
    hardware = replace(GPUS[name], features=GPUS[name].features | {"triton"})
    _, layouts = bind_model(model, BUCKETS, hardware)
    assert set(layouts.values()) == ({E4M3FNUZ.name} if converted else set())
    suffix = "_fnuz" if converted else ""
    bound = {path: tuple(choice.provider for choice in site.choices) for path, site in sites(model)}
    mixtures = {providers for path, providers in bound.items() if path.endswith("mixture")}
    assert mixtures == {("triton_few" + suffix, "triton_grouped" + suffix, "triton_grouped" + suffix)}
    many = "torch_row_fp8" if name == "h200" else "triton_row_fp8" + suffix
    qkvz = {providers for path, providers in bound.items() if path.endswith("qkvz.product")}
    assert qkvz == {("triton_skinny" + suffix, "triton_row_fp8" + suffix, many)}
