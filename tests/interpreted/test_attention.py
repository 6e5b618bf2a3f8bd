"""The Triton providers of attention and its prologue under Triton's interpreter, on tiny odd shapes; what Hopper's refuses."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from ops.examples_a import normal, paged_batch

from firstlight.hardware import GPUS, H200
from firstlight.ops.attention import attention, hopper_paged, triton_paged
from firstlight.ops.attention_prologue import attention_prologue, triton_fused
from firstlight.ops.op import Call

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

SPLIT = triton_paged.Tiles(tokens=9, rows=32, keys=16, splits=3, warps=4, stages=1)
SMALL = triton_paged.Tiles(tokens=5, rows=16, keys=16, splits=1, warps=4, stages=1)


@pytest.fixture
def exact_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own cast to e4m3 loses carries, which halves values, and its cast from e4m3 knows no NaN."""
    from triton.runtime import interpreter

    own = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(target) == "fp8e4nv":
            assert str(source) == "fp32"
            found = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).to(torch.float8_e4m3fn)
            return found.view(torch.uint8).numpy()
        if str(source) == "fp8e4nv":
            assert str(target) in ("fp32", "fp16")
            wide = torch.from_numpy(np.ascontiguousarray(values)).view(torch.float8_e4m3fn)
            bits = np.uint32 if str(target) == "fp32" else np.uint16
            return wide.to(torch.float32 if str(target) == "fp32" else torch.float16).numpy().view(bits)
        return own(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", [None, SPLIT, SMALL], ids=["chosen", "split", "small"])
@pytest.mark.parametrize("settings", [{}, {"window": 3, "sinks": normal(6)}], ids=lambda s: ",".join(s))
@pytest.mark.parametrize("size", [7, 16, 64])
@pytest.mark.parametrize(
    ("counts", "lengths"), [([1, 1, 1], [5, 1, 40]), ([9, 1, 3], [9, 12, 33]), ([33, 20], [170, 20])], ids=str
)
def test_float8_pages(
    counts: list[int],
    lengths: list[int],
    size: int,
    settings: dict[str, Any],
    tiles: triton_paged.Tiles | None,
    dtype: torch.dtype,
) -> None:
    """What is nobody's is NaN, in pages and in a null page."""
    if tiles is SPLIT and max(counts) > SPLIT.tokens:
        tiles = None
    batch = paged_batch(counts, lengths, size=size, dtype=dtype, padding=2, pages_dtype=torch.float8_e4m3fn)
    if max(lengths) > 2 * size:
        batch["pages"][batch["row"][lengths.index(max(lengths))], 1] = 0
    bounds = {"scale": 0.3, "max_query": max(counts), "max_context": max(lengths) + 5}
    ours = triton_paged.run(*batch.values(), **bounds, **settings, tiles=tiles)[: sum(counts)]
    exact = [x.double() if x.is_floating_point() else x for x in batch.values()]
    theirs = attention.reference(*exact, **bounds, **settings)[: sum(counts)]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


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
@pytest.mark.parametrize(
    "settings", [{}, {"window": 40}, {"causal": False, "sinks": normal(6)}], ids=lambda s: ",".join(s)
)
@pytest.mark.parametrize("size", [5, 16, 32, 64])
def test_prompts(size: int, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Tiles of keys that every row sees, in one page or several; a null page among them; a request without a context."""
    counts, lengths = [33, 4, 20], [170, 0, 20]
    batch = paged_batch(counts, lengths, size=size, dtype=dtype, padding=2)
    batch["pages"][batch["row"][0], 1] = 0
    bounds = {"scale": 0.3, "max_query": max(counts), "max_context": max(lengths)}
    tiles = triton_paged.Tiles(tokens=10, rows=32, keys=32, splits=1, warps=4, stages=1)
    ours = triton_paged.run(*batch.values(), **bounds, **settings, tiles=tiles)[: sum(counts)]
    exact = [x.double() if x.is_floating_point() else x for x in batch.values()]
    theirs = attention.reference(*exact, **bounds, **settings)[: sum(counts)]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"dim": 128, "heads": 32, "kv_heads": 8}, None),
        ({"dtype": torch.float16}, None),
        ({"hardware": GPUS["b200"]}, "serves sm_90, not sm_100"),
        ({"hardware": GPUS["mi300x"]}, "serves sm_90, not gfx942"),
        ({"dtype": torch.float32}, "multiplies bfloat16 and float16, not torch.float32"),
        ({"pages": torch.float8_e4m3fn}, "the pages are torch.float8_e4m3fn, the queries torch.bfloat16"),
        ({"size": 16}, "serves pages of 64 tokens, not 16"),
        ({"dim": 64}, "serves heads of 128 or 256 dimensions, not 64"),
        ({"heads": 12}, "serves groups of 1, 2, 4, ... 64 query heads a KV head, not 6"),
        ({"window": 128}, "reads whole contexts, not a window"),
        ({"scale": 0.0}, "needs a scale above 0, not 0.0"),
        ({"max_query": 8}, "serves prompts of 65 rows (tokens x heads of a group) or more, not 64"),
        ({"stride": 260}, "needs dense heads, and addresses and strides that are multiples of 16 bytes"),
    ],
    ids=lambda part: ",".join(part) if isinstance(part, dict) else str(part),
)
def test_what_hopper_refuses(changed: dict[str, Any], reason: str | None) -> None:
    case = {"heads": 16, "kv_heads": 2, "dim": 256, "size": 64, "dtype": torch.bfloat16, "hardware": H200} | changed
    q = torch.empty(70, case["heads"], case["dim"], dtype=case["dtype"], device="meta")
    stride = case.get("stride", case["dim"])
    shape = (3, 4, 2, case["size"], case["kv_heads"], stride)
    pool = torch.empty(shape, dtype=case.get("pages", case["dtype"]), device="meta")[..., : case["dim"]]
    indices = (torch.empty(2, 3, dtype=torch.int32, device="meta"), *(torch.empty(2, device="meta") for _ in range(3)))
    settings = {"scale": 0.1, "max_query": 70, "max_context": 200} | {
        k: v for k, v in changed.items() if k in ("scale", "max_query", "window")
    }
    call = Call((q, pool[:, 1, 0], pool[:, 1, 1], *indices), settings, None, case["hardware"])
    found = hopper_paged.when(call)
    assert found is None if reason is None else found is not None and reason in found
    if "stride" in changed or "size" in changed:
        with pytest.raises(ValueError, match=f"{reason}.*choose another provider"):
            hopper_paged.run(*call.args, **settings)


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


@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [5, 70])
@pytest.mark.parametrize("settings", [{}, {"gated": True, "zero_centred": True}], ids=str)
def test_prologue_with_float8_pages(settings: dict[str, bool], tokens: int, dtype: torch.dtype) -> None:
    """To one unit in the last place of e4m3; values beyond its largest number are clamped, NaN stays NaN."""
    width = (3 * (1 + settings.get("gated", False)) + 2) * 8
    qkv = normal(tokens, width).to(dtype)
    qkv[1, -8:] = torch.tensor([500.0, -500.0, 464.0, 3e4, -3e4, torch.nan, 448.0, 0.001])
    norms = [normal(8).to(dtype), normal(8, seed=2).to(dtype)]
    slot = torch.randperm(150, generator=torch.Generator().manual_seed(tokens))[:tokens] + 4
    pools = [[torch.full((40, 4, 1, 8), float("nan")).to(torch.float8_e4m3fn) for _ in "kv"] for _ in range(2)]
    sizes = {"heads": 3, "kv_heads": 1, "head_dim": 8, "eps": 1e-5, **settings}
    ours = triton_fused.run(qkv, *norms, normal(tokens, 4), *pools[0], slot, **sizes)
    theirs = attention_prologue.reference(qkv, *norms, normal(tokens, 4), *pools[1], slot, **sizes)
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-3, atol=2e-3)
    keys, values = ([pool[i].float() for pool in pools] for i in range(2))
    torch.testing.assert_close(*keys, rtol=0.125, atol=2**-9, equal_nan=True)
    torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)
    assert values[0].nan_to_num(0).abs().max() == 448
