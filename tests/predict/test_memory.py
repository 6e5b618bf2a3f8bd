"""The pool that is predicted is the one that the engine makes."""

from __future__ import annotations

import json

import pytest
from predict.priced import config

from firstlight.config import EngineOptions
from firstlight.engine.loading import bind_only, cache_geometry
from firstlight.hardware import GPUS
from firstlight.predict.layout import Layout, build
from firstlight.predict.memory import memory_of, weight_bytes


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize(
    ("page_size", "max_running", "checkpoint_gib", "prefix_cache"),
    [(16, 8, 0.0, True), (64, 256, 0.01, True), (16, 8, 0.01, False)],
)
def test_pages_and_slots_are_the_engines(name, page_size, max_running, checkpoint_gib, prefix_cache, tmp_path):
    raw = config(name)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options = EngineOptions(
        model=str(tmp_path / "config.json"), weights="random", device="cpu", cache_gib=0.05, page_size=page_size,
        max_running=max_running, checkpoint_gib=checkpoint_gib, prefix_cache=prefix_cache,
    )  # fmt: skip
    engine = cache_geometry(options, bind_only(options))
    ours = memory_of(
        build(raw, Layout()), GPUS["h200"], cache_bytes=int(0.05 * 2**30), page_size=page_size,
        max_running=max_running, checkpoint_bytes=(int(checkpoint_gib * 2**30) or None) if prefix_cache else 0,
    ).geometry  # fmt: skip
    assert ours is not None
    for figure in ("pages", "slots", "checkpoint_slots", "page_bytes", "slot_bytes"):
        assert getattr(ours, figure) == getattr(engine, figure)
    assert prefix_cache or engine.checkpoint_slots == 0


def test_weights_are_counted_as_stored():
    model = build(config("Qwen3-8B"), Layout())
    parameters = 8_190_735_360
    assert weight_bytes(model) == 2 * parameters
    assert weight_bytes(build(config("Qwen3-8B"), Layout(float8_weights=True))) < 1.2 * parameters
    assert weight_bytes(build(config("Qwen3-8B"), Layout(tensor_parallel=2))) == pytest.approx(parameters, rel=1e-3)


def test_what_does_not_fit_is_said():
    assert memory_of(build(config("Qwen3.5-397B-A17B"), Layout()), GPUS["h200"]).geometry is None
    roomy = memory_of(build(config("Qwen3-8B"), Layout()), GPUS["h200"])
    token = 2 * 8 * 128 * 2 * 36
    assert roomy.requests(4096) == pytest.approx(roomy.cache / token / 4096, rel=0.01)
