"""Activations that go packed from op to op on a GPU: what a step gives in which every product quantises what it reads."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import answer, engine, prompts
from emission_checks import (
    EMITTED,
    FORMS,
    check_emitted_gated_delta,
    check_emitted_rows,
    check_packed_product,
)
from float8_model import fill_caches, float8_config, float8_model, mixed_step

from firstlight.hardware.detect import detect
from firstlight.ops.gated_delta import triton_chunked, triton_decode
from firstlight.ops.handover import kept_plain
from firstlight.ops.linear import torch_block_fp8, triton_block_fp8
from firstlight.ops.op import sites
from firstlight.quant import FLOAT8_BY_COLUMN, Emission
from firstlight.scheduling.sampling import SamplingParams
from firstlight.step import Bucket

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BF16 = torch.bfloat16
EVERY_FORM = pytest.mark.parametrize("emit", EMITTED, ids=["packed alone", "and plain", "by token"])
WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
"""Columns of every product are multiples of 512, as torch's wants them."""
BUCKETS = [Bucket(0, 4, 4, 1, 512, 4), Bucket(1, 40, 40, 1, 512, 40), Bucket(2, 400, 8, 320, 512, 400)]


@EVERY_FORM
@pytest.mark.parametrize(("tokens", "columns"), [(1, 128), (33, 384), (257, 2048), (40, 4096), (7, 5120), (2048, 2048)])
def test_rows(tokens: int, columns: int, emit: Emission) -> None:
    check_emitted_rows("cuda", BF16, tokens, columns, emit)


@EVERY_FORM
@pytest.mark.parametrize("requests", [2, 44, 45, 200])
def test_decode(requests: int, emit: Emission) -> None:
    """Three heads a request: the last program of each normalises up to 44 requests, a kernel of its own for more."""
    check_emitted_gated_delta(triton_decode.run, emit, [1] * requests, "cuda", BF16, key_dim=128)


@EVERY_FORM
@pytest.mark.parametrize("counts", [[5, 66], [1500], [130] * 20])
def test_prefill(counts: list[int], emit: Emission) -> None:
    check_emitted_gated_delta(triton_chunked.run, emit, counts, "cuda", BF16, key_dim=128)


@pytest.mark.parametrize("tokens", [2, 16, 31, 65, 300])
@pytest.mark.parametrize(("rows", "columns"), [(130, 256), (2048, 4096), (12288, 2048)])
def test_products(tokens: int, rows: int, columns: int) -> None:
    check_packed_product(triton_block_fp8.run, FORMS, "cuda", BF16, tokens, rows, columns, bias=True)


@pytest.mark.parametrize("tokens", [256, 257, 1030])
def test_products_of_torch(tokens: int) -> None:
    check_packed_product(torch_block_fp8.run, [FLOAT8_BY_COLUMN], "cuda", BF16, tokens, 384, 1024)


@pytest.mark.parametrize(
    ("bucket", "contexts", "new"),
    [(0, [9, 1, 33], []), (1, list(range(2, 40)), []), (2, [], [300, 65]), (2, [9, 33], [300, 7])],
    ids=["few rows", "rows", "prompts", "mixed"],
)
def test_steps_are_the_same_and_can_be_captured(bucket: int, contexts: list[int], new: list[int]) -> None:
    pages = 1 + (len(contexts) + len(new)) * 20
    model = float8_model(BUCKETS, detect("cuda"), "cuda", pages=pages, slots=48, **WIDE)
    notes = [site.choices[bucket].handover for _, site in sites(model) if site.choices]
    assert sum(note.startswith("gives float8") for note in notes) >= 8
    step = mixed_step(BUCKETS[bucket], contexts, new, "cuda")
    results = []
    for form in (nullcontext(), kept_plain(model)):
        pools = fill_caches(model)
        with form, torch.inference_mode():
            results.append([model(step), *[pool.clone() for pool in pools]])
    assert results[0][0].isfinite().all()
    for packed, plain in zip(*results, strict=True):  # equal but for a rounding here and there, see emission_checks
        assert (packed.double() - plain.double()).square().mean() <= (1e-2) ** 2 * plain.double().square().mean()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        logits = model(step)
    for _ in range(3):
        pools = fill_caches(model)
        graph.replay()
        torch.cuda.synchronize()
        for replayed, expected in zip([logits, *pools], results[0], strict=True):
            assert torch.equal(replayed, expected)


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_gives_the_same_tokens(graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(float8_config(**WIDE)))
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "weights": "random", "max_running": 8, "step_tokens": 320,
        "graphs": graphs,
    }  # fmt: skip
    sampling = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, max_tokens=16)
    packed = engine(tmp_path, **options)
    monkeypatch.setattr("firstlight.ops.binding.hand_over", lambda binder, bound: None)
    plain = engine(tmp_path, **options)
    handed = [any(choice.handover for choice in site.choices) for _, site in sites(packed.loaded.model)]
    assert any(handed)
    assert not any(choice.handover for _, site in sites(plain.loaded.model) for choice in site.choices)
    assert answer(packed, prompts()) == answer(plain, prompts())
    assert answer(packed, prompts(), sampling) == answer(plain, prompts(), sampling)
