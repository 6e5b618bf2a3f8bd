"""Whole steps of a model in FP8 on Triton's kernels: handing activations over packed changes no bit of what they give."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from float8_model import fill_caches, float8_model, mixed_step

from firstlight.hardware import GPUS
from firstlight.ops.handover import kept_plain
from firstlight.ops.linear import triton_block_fp8_kernel
from firstlight.ops.linear.triton_quantise import quantised as quantise
from firstlight.ops.op import sites
from firstlight.step import Bucket

BUCKETS = [Bucket(0, 3, 3, 1, 64, 3), Bucket(1, 12, 4, 9, 64, 12)]
GPU = replace(GPUS["mi355x"], features=GPUS["mi355x"].features | {"triton"})
"""Bound for one whose providers are all Triton's own, so that they can be interpreted."""
GIVERS = {
    "layers.0.input_layernorm.norm", "layers.0.mixer.mix.decode", "layers.0.post_attention_layernorm.add_norm",
    "layers.0.mlp.activation", "layers.1.input_layernorm.add_norm", "layers.1.mixer.gate",
    "layers.1.post_attention_layernorm.add_norm", "layers.1.mlp.activation",
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return float8_model(BUCKETS, GPU, "cpu")


@pytest.mark.parametrize(
    ("bucket", "contexts", "prompts"),
    [(0, [9, 1, 33], []), (1, [9, 33], [7]), (1, [], [3, 8])],
    ids=["decode", "mixed", "prompts"],
)
def test_steps_are_equal(model, bucket, contexts, prompts, monkeypatch):
    noted = {path: site.choices[bucket].handover for path, site in sites(model) if site.choices}
    gives = {path for path, form in noted.items() if form.startswith("gives float8")}
    assert gives == GIVERS | ({"layers.0.mixer.mix.prefill"} if bucket else set())
    results, quantised = [], []
    monkeypatch.setattr(
        triton_block_fp8_kernel, "quantised", lambda x, dtype: quantised.append(1) or quantise(x, dtype)
    )
    for form in (nullcontext(), kept_plain(model)):
        step, pools = mixed_step(BUCKETS[bucket], contexts, prompts, "cpu"), fill_caches(model)
        with form, torch.inference_mode():
            results.append([model(step), *[pool.clone() for pool in pools]])
        quantised.append(0)
    assert quantised == [0, *[1] * 8, 0], "products quantised what was handed over"
    assert results[0][0].isfinite().all()
    for packed, plain in zip(*results, strict=True):
        assert torch.equal(packed, plain)
