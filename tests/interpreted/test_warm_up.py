"""A hosted model's trial steps on Triton's kernels: they run before the host has given memory, and leave nothing to be compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted.own_process import needs_gluon, printed
from reference import tiny_config

from firstlight.hardware import GPUS
from firstlight.ops.op import sites
from firstlight.plugin import core
from firstlight.plugin.core import HostBounds, HostedModel, kinds_of_steps

GPU = replace(GPUS["mi355x"], features=GPUS["mi355x"].features | {"triton"})
"""Bound for one whose providers are all Triton's own, so that they can be interpreted."""


@pytest.mark.parametrize(("page_size", "exports"), [(1, True), (64, False)], ids=["tokens", "pages"])
def test_every_kind_of_step_runs_on_null_memory(page_size, exports, monkeypatch):
    monkeypatch.setattr(core, "detect", lambda device: GPU)
    bounds = HostBounds(tokens=6, requests=4, context=6, page_size=page_size, exports=exports)
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "vocab_size": 64}
    config = tiny_config("qwen3_5_moe_text") | layers
    model = HostedModel(config, dtype=torch.float32, device="cpu", bounds=bounds)
    model.load_random()
    providers = {choice.provider for _, site in sites(model.model) for choice in site.choices}
    assert {"triton_paged", "triton_chunked", "triton_decode"} <= providers
    hidden, finite = model.hidden, []
    monkeypatch.setattr(model, "hidden", lambda step: finite.append(hidden(step)) or finite[-1])
    model.warm_up()
    assert len(finite) == len(list(kinds_of_steps(model.buckets, bounds)))
    assert all(x.isfinite().all() for x in finite)


@needs_gluon
@pytest.mark.parametrize(("host", "kv_heads"), [("vllm", 2), ("vllm", 4), ("sglang", 2)])
def test_steps_of_a_host_need_no_variant_that_no_trial_step_launched(host, kv_heads):
    lines = printed("warm_up_variants.py", host, str(kv_heads))
    assert len(lines) == 15
    assert {line["step"]: line["new"] for line in lines if line["new"]} == {}
