"""What would make a batch fit, tried: each of the ways does, and one step less doesn't."""

from __future__ import annotations

from itertools import pairwise

import pytest
from predict.priced import config

from firstlight.config import EngineOptions
from firstlight.hardware import GPUS
from firstlight.predict.fit import engine_memory, what_would_fit
from firstlight.predict.layout import Layout, build
from firstlight.predict.report import misfit_line

OPTIONS = EngineOptions(model="-")


def held(name, gpu, layout, requests, context):
    """Requests of `context` tokens that an engine for `requests` of them holds."""
    model = build(config(name), layout)
    return engine_memory(model, GPUS[gpu], OPTIONS, requests, context).requests(context)


def ways(name, gpu, requests, context, layout=None):
    return what_would_fit(config(name), layout or Layout(), GPUS[gpu], OPTIONS, requests, context)


@pytest.mark.parametrize(
    ("name", "gpu", "requests", "context", "wanted"),
    [
        ("Qwen3.5-397B-A17B", "h200", 4, 4096, ["--tp 8", "--tp 4 --fp8-weights"]),
        ("Qwen3-8B", "h200", 40, 32768, ["--tp 2", "--fp8-kv"]),
        ("Qwen3-8B", "h200", 900, 32768, []),
        ("Kimi-K2-Instruct", "h100", 1, 4096, ["--dp 32 --ep 32"]),
    ],
)
def test_the_least_that_would_fit_is_named(name, gpu, requests, context, wanted):
    assert held(name, gpu, Layout(), requests, context) < requests
    assert ways(name, gpu, requests, context) == wanted
    for way in wanted:
        words = way.split()
        sizes = {word: int(size) for word, size in pairwise(words) if size.isdigit()}
        layout = Layout(
            sizes.get("--tp", 1), sizes.get("--dp", 1), sizes.get("--ep", 1),
            float8_weights="--fp8-weights" in words, float8_cache="--fp8-kv" in words,
        )  # fmt: skip
        assert held(name, gpu, layout, requests, context) >= requests


def test_experts_that_are_spread_stay_so():
    [wider, *_] = ways("Qwen3.5-397B-A17B", "h100", 1, 4096, Layout(1, 8, 8))
    assert wider == "--tp 2 --ep 16"


def test_the_line_says_how_many_fit():
    model = build(config("Qwen3-8B"), Layout())
    memory = engine_memory(model, GPUS["h200"], OPTIONS, 1, 32768)
    most = memory.requests(32768)
    assert held("Qwen3-8B", "h200", Layout(), most, 32768) == most
    line = str(misfit_line(memory, GPUS["h200"], 900, 32768, []))
    assert f"the rest holds {most} requests of 32,768 tokens, not 900; what would: --batch {most}." in line
