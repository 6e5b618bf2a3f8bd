"""KV pages in FP8: half the memory, answers a little different, and still the same however a step is made up.

Every engine starts with all cache memory at NaN, so that a read of a null, freed or unwritten row shows at once.
"""

from __future__ import annotations

import json

import pytest
import torch
from driver import VARIANTS, answer, engine, prompts, small_cache
from forward import load, logits, sequence
from reference import save_checkpoint, tiny_config

from firstlight.config import EngineOptions
from firstlight.engine.loading import bind_only
from firstlight.errors import FirstlightError
from firstlight.hardware import GPUS
from firstlight.nn.module import caches
from firstlight.predict.layout import Layout, build
from firstlight.scheduling.sampling import SamplingParams

FLOAT8 = {"kv_dtype": "float8_e4m3fn"}
NAMES = ("llama", "qwen3_5_moe_text")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: save_checkpoint(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(scope="module")
def expected(checkpoints):
    """Answers by the name of the model."""
    return {name: answer(engine(checkpoints[name], **FLOAT8), prompts()) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_how_a_step_is_made_up_changes_no_token(name, variant, checkpoints, expected):
    running = engine(checkpoints[name], **FLOAT8, **VARIANTS[variant])
    assert answer(running, prompts()) == expected[name]
    assert answer(running, prompts()) == expected[name]  # now with what the first round left in the cache


@pytest.mark.parametrize("name", NAMES)
def test_preemption_changes_no_token(name, checkpoints):
    long = SamplingParams(temperature=0, max_tokens=60)
    asked = prompts((290, 310, 300), seed=9)
    calm = answer(engine(checkpoints[name], cache_gib=0.1, **FLOAT8), asked, long)
    room = small_cache(checkpoints[name], pages=40, live=2, cache_dtype=torch.float8_e4m3fn)
    tight = engine(checkpoints[name], **room, **FLOAT8)
    assert answer(tight, asked, long) == calm
    assert tight.scheduler.metrics.preemptions > 0, "the cache was meant to be too small for all at once"


@pytest.mark.parametrize("name", NAMES)
def test_pages_take_a_quarter_of_float32(name, checkpoints):
    wide, narrow = engine(checkpoints[name]), engine(checkpoints[name], **FLOAT8)
    assert narrow.executor.pool.page_bytes * 4 == wide.executor.pool.page_bytes
    assert narrow.executor.pool.slot_bytes == wide.executor.pool.slot_bytes
    assert narrow.executor.pool.pages > wide.executor.pool.pages


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_stay_near(name, checkpoints):
    """Of 75 tokens, whole and in steps, which must agree; e4m3 rounds by up to 1 in 16."""
    wide = logits(load(checkpoints[name]), sequence()).log_softmax(-1)
    model = load(checkpoints[name], cache_dtype=torch.float8_e4m3fn)
    whole = logits(model, sequence()).log_softmax(-1)
    apart = logits(load(checkpoints[name], cache_dtype=torch.float8_e4m3fn), sequence(), (1, 17, 40, 41)).log_softmax(
        -1
    )
    torch.testing.assert_close(apart, whole, rtol=0, atol=0.05)
    probability = wide.exp()
    divergence = (probability * (wide - whole)).sum(-1)
    assert 1e-7 < divergence.mean() < 0.05, "they are near, but not the same"


def test_prediction_and_binding_have_the_same_pages(tmp_path):
    """`explain --fp8-kv` prices what `--kv-dtype float8_e4m3fn` runs."""
    config = tiny_config("qwen3_5_moe_text") | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = EngineOptions(model=str(tmp_path), weights="random", **FLOAT8)
    bound = bind_only(options, hardware=GPUS["h200"])
    assert caches(bound.model) == caches(build(config, Layout(float8_cache=True)))


def test_latents_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("deepseek_v3")))
    with pytest.raises(FirstlightError, match=r"--kv-dtype float8_e4m3fn: .* keeps latent .* use --kv-dtype auto"):
        bind_only(EngineOptions(model=str(tmp_path), weights="random", device="cpu", **FLOAT8))
