"""The Triton providers of attention and its prologue under Triton's interpreter, on tiny odd shapes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ops.examples_a import normal, paged_batch

from firstlight.ops.attention import attention, triton_paged
from firstlight.ops.attention_prologue import attention_prologue, triton_fused

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

SPLIT = triton_paged.Tiles(tokens=9, rows=32, keys=16, splits=3, warps=4, stages=1)
SMALL = triton_paged.Tiles(tokens=5, rows=16, keys=16, splits=1, warps=4, stages=1)


@pytest.mark.parametrize("tiles", [None, SPLIT, SMALL], ids=["chosen", "split", "small"])
@pytest.mark.parametrize(
    "settings", [{}, {"window": 3}, {"causal": False}, {"sinks": normal(6)}], ids=lambda s: ",".join(s)
)
@pytest.mark.parametrize("size", [7, 16])
@pytest.mark.parametrize(("counts", "lengths"), [([1, 1, 1], [5, 1, 40]), ([9, 1, 3], [9, 12, 33])], ids=str)
def test_attention(
    counts: list[int], lengths: list[int], size: int, settings: dict[str, Any], tiles: triton_paged.Tiles | None
) -> None:
    args = list(paged_batch(counts, lengths, size=size, padding=2).values())
    bounds = {"scale": 0.3, "max_query": max(counts), "max_context": max(lengths) + 5}
    ours = triton_paged.run(*args, **bounds, **settings, tiles=tiles)[: sum(counts)]
    theirs = attention.reference(*args, **bounds, **settings)[: sum(counts)]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [5, 70])
@pytest.mark.parametrize("settings", [{}, {"gated": True, "zero_centred": True}], ids=str)
def test_prologue(settings: dict[str, bool], tokens: int, dtype: torch.dtype) -> None:
    """Null slots are dropped, pages that nobody writes stay as they are."""
    width = (3 * (1 + settings.get("gated", False)) + 2) * 8
    qkv = normal(tokens, width + 5).to(dtype)[:, :width]
    norms = [normal(8).to(dtype), normal(8, seed=2).to(dtype)]
    slot = torch.randperm(150, generator=torch.Generator().manual_seed(tokens))[:tokens]
    pools = [[torch.full((40, 4, 1, 8), float("nan"), dtype=dtype) for _ in "kv"] for _ in range(2)]
    sizes = {"heads": 3, "kv_heads": 1, "head_dim": 8, "eps": 1e-5, **settings}
    ours = triton_fused.run(qkv, *norms, normal(tokens, 4), *pools[0], slot, **sizes)
    theirs = attention_prologue.reference(qkv, *norms, normal(tokens, 4), *pools[1], slot, **sizes)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    for a, b in ((ours[0], theirs[0]), *((a[1:], b[1:]) for a, b in zip(*pools, strict=True))):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert ours[1] is None if theirs[1] is None else torch.equal(ours[1], theirs[1])
