"""The Triton providers of attention (Hopper's too) and its prologue on a GPU, against float64 references, with fresh inputs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.hardware import detect
from firstlight.ops.attention import attention, hopper_paged, triton_paged
from firstlight.ops.attention_prologue import attention_prologue, triton_fused
from firstlight.ops.op import Call
from firstlight.ops.triton_support import float8_pages_unavailable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_HOPPER = torch.cuda.is_available() and detect("cuda").architecture == "sm_90"
HOPPER = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
FLOAT8 = torch.float8_e4m3fn
CONVERTS = torch.cuda.is_available() and float8_pages_unavailable(detect("cuda"), torch.empty(0, dtype=FLOAT8)) is None
PAGES = pytest.mark.parametrize(
    "float8",
    [False, pytest.param(True, marks=pytest.mark.skipif(not CONVERTS, reason="needs a GPU that converts e4m3fn"))],
)


def fresh_generator() -> torch.Generator:
    """Its seed is printed, so that a failure can be repeated."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return torch.Generator("cuda").manual_seed(seed)


def batch(
    counts: list[int], lengths: list[int], *, heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Any]]:
    """Arguments of `attention`: pages of a block-major pool dealt at random, NaN wherever there is no key, one null page."""
    generator = fresh_generator()
    needed = [-(-length // page) for length in lengths]
    pool = torch.full((sum(needed) + 3, 2, 2, page, kv_heads, dim), float("nan"), dtype=dtype, device="cuda")
    order = (torch.randperm(sum(needed) + 2, generator=generator, device="cuda") + 1).tolist()
    table = torch.zeros(len(counts) + 1, max(needed) + 1, dtype=torch.int32)
    for r, length in enumerate(lengths):
        for i in range(needed[r]):
            table[r + 1, i] = order.pop()
            rows = min(page, length - i * page)
            values = torch.randn(2, rows, kv_heads, dim, generator=generator, device="cuda")
            pool[table[r + 1, i], 1, :, :rows] = values.to(dtype)
    if needed[-1] > 2:
        table[len(counts), 1] = 0
    q = torch.randn(sum(counts) + 2, heads, dim, generator=generator, device="cuda").to(dtype)
    q[sum(counts) :] = float("nan")
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    indices = (table, torch.arange(1, len(counts) + 1), start, torch.tensor(lengths, dtype=torch.int32))
    args = [q, pool[:, 1, 0], pool[:, 1, 1], *(index.cuda() for index in indices)]
    return args, {"scale": dim**-0.5, "max_query": max(counts), "max_context": max(lengths) + 7}


@DTYPES
@PAGES
@pytest.mark.parametrize("settings", [{}, {"window": 40}, {"causal": False}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 16, "kv_heads": 2, "dim": 256, "page": 64},
        {"heads": 8, "kv_heads": 2, "dim": 128, "page": 16},
        {"heads": 12, "kv_heads": 4, "dim": 80, "page": 1},
        {"heads": 5, "kv_heads": 1, "dim": 64, "page": 33},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("counts", "lengths"), [([1, 1, 1], [700, 1, 130]), ([4, 2], [4, 300]), ([150, 1, 33], [150, 90, 200])]
)
def test_attention(
    counts: list[int],
    lengths: list[int],
    shape: dict[str, int],
    settings: dict[str, Any],
    float8: bool,
    dtype: torch.dtype,
) -> None:
    args, bounds = batch(counts, lengths, dtype=dtype, **shape)
    if float8:
        args[1:3] = [pool.to(FLOAT8) for pool in args[1:3]]
    settings = dict(settings)
    if settings.pop("sinks", False):
        settings["sinks"] = torch.randn(shape["heads"], device="cuda")
    ours = triton_paged.run(*args, **bounds, **settings)[: sum(counts)]
    theirs = attention.reference(*(x.double() if x.is_floating_point() else x for x in args), **bounds, **settings)
    largest = args[2].double().nan_to_num(0).abs().max()
    assert ours.dtype == dtype
    assert (ours.double() - theirs[: sum(counts)]).abs().max() < TOLERANCE[dtype] * largest


@HOPPER
@pytest.mark.parametrize(
    ("shape", "dtype", "settings"),
    [
        ({"heads": 16, "kv_heads": 2, "dim": 256}, torch.bfloat16, {}),
        ({"heads": 16, "kv_heads": 2, "dim": 256}, torch.bfloat16, {"causal": False, "sinks": True}),
        ({"heads": 16, "kv_heads": 2, "dim": 256}, torch.float16, {"sinks": True}),
        ({"heads": 32, "kv_heads": 8, "dim": 128}, torch.bfloat16, {}),
        ({"heads": 3, "kv_heads": 3, "dim": 128}, torch.float16, {"causal": False}),
        ({"heads": 64, "kv_heads": 1, "dim": 256}, torch.bfloat16, {"sinks": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("counts", "lengths"),
    [
        ([130, 1, 65, 300], [130, 700, 640, 300]),
        ([17, 16, 66], [1041, 64, 66]),
        ([200, 40, 129, 70], [333, 128, 257, 70]),
        ([90, 3, 40], [90, 0, 200]),
    ],
)
def test_prompts_on_hopper(
    counts: list[int], lengths: list[int], shape: dict[str, int], dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    """Prefixes, ends of pages that are NaN, a null page, a request without a context."""
    args, bounds = batch(counts, lengths, page=64, dtype=dtype, **shape)
    settings = dict(settings)
    if settings.pop("sinks", False):
        settings["sinks"] = torch.randn(shape["heads"], device="cuda")
    assert hopper_paged.when(Call(tuple(args), bounds | settings, None, detect("cuda"))) is None
    ours = hopper_paged.run(*args, **bounds, **settings)[: sum(counts)]
    theirs = attention.reference(*(x.double() if x.is_floating_point() else x for x in args), **bounds, **settings)
    largest = args[2].nan_to_num(0).abs().max().double()
    assert ours.dtype == dtype
    assert (ours.double() - theirs[: sum(counts)]).abs().max() < TOLERANCE[dtype] * largest


@HOPPER
def test_a_long_prompt_on_hopper() -> None:
    """8,192 tokens: right at their end, the same bit for bit in a repeat, in pages that lie otherwise, and in a graph."""
    args, bounds = batch([8192], [8192], heads=16, kv_heads=2, dim=256, page=64, dtype=torch.bfloat16)
    q, k_pages, v_pages, *indices = args
    first = hopper_paged.run(*args, **bounds)[:8192]
    last = [q[8128:8192], k_pages, v_pages, *indices]
    last[5] = torch.tensor([0, 64], device="cuda")
    theirs = attention.reference(*(x.double() if x.is_floating_point() else x for x in last), **bounds)
    largest = v_pages.nan_to_num(0).abs().max().double()
    assert (first[8128:].double() - theirs).abs().max() < TOLERANCE[torch.bfloat16] * largest
    assert torch.equal(hopper_paged.run(*args, **bounds)[:8192], first)

    # A row's keys and values side by side, all rows of a head before the next head's.
    rows = torch.cat([k_pages, v_pages], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(hopper_paged.run(q, rows[..., :256], rows[..., 256:], *indices, **bounds)[:8192], first)

    pool = torch.stack([k_pages, v_pages]).zero_()
    inputs, out = q.clone(), torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper_paged.run(inputs, pool[0], pool[1], *indices, **bounds, out=out)
    pool[0], pool[1] = k_pages, v_pages
    graph.replay()
    assert torch.equal(out[:8192], first)


@pytest.mark.parametrize(
    ("run", "queries"),
    [
        (triton_paged.run, 1),
        (triton_paged.run, 20),
        pytest.param(hopper_paged.run, 20, marks=HOPPER),
    ],
)
def test_pages_beyond_two_billion_elements(run: Any, queries: int) -> None:
    """A page whose offset in the pool takes more than 32 bits."""
    pool = torch.empty(3, 2**30, dtype=torch.bfloat16, device="cuda")
    pages = pool[:, : 2 * 64 * 2 * 256].view(3, 2, 64, 2, 256)
    pages[2].normal_()
    q = torch.randn(queries, 16, 256, device="cuda").bfloat16()
    table = torch.tensor([[2]], dtype=torch.int32, device="cuda")
    indices = (table, torch.tensor([0]).cuda(), torch.tensor([0, queries]).cuda(), torch.tensor([50]).cuda())
    bounds = {"scale": 0.06, "max_query": queries, "max_context": 64}
    ours = run(q, pages[:, 0], pages[:, 1], *indices, **bounds)
    theirs = attention.reference(q.double(), pages[:, 0].double(), pages[:, 1].double(), *indices, **bounds)
    assert (ours.double() - theirs).abs().max() < 0.05


@DTYPES
@PAGES
@pytest.mark.parametrize("tokens", [1, 70, 301])
@pytest.mark.parametrize(
    "settings",
    [
        {"heads": 16, "kv_heads": 2, "head_dim": 256, "gated": True, "zero_centred": True},
        {"heads": 6, "kv_heads": 3, "head_dim": 80},
    ],
    ids=str,
)
def test_prologue(settings: dict[str, Any], tokens: int, float8: bool, dtype: torch.dtype) -> None:
    """Null slots are dropped, pages that nobody writes stay as they are. e4m3 pages hold what the others would, rounded: a
    unit in its last place is allowed, as a kernel of its own may add up in another order."""
    generator = fresh_generator()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    heads, kv_heads, dim = (settings[name] for name in ("heads", "kv_heads", "head_dim"))
    width = heads * dim * (1 + settings.get("gated", False)) + 2 * kv_heads * dim
    qkv = normal(tokens, width + 16).to(dtype)[:, :width]
    norms = [normal(dim).to(dtype) for _ in "qk"]
    angles = normal(tokens, dim // 4 * 2)
    slot = torch.randperm(tokens + 30, generator=generator, device="cuda")[:tokens] + 16
    slot[-1] = 0
    pools = [
        torch.full((2, tokens // 16 + 4, 16, kv_heads, dim), float("nan"), dtype=dtype, device="cuda") for _ in "abc"
    ]
    if float8:
        qkv[0, -dim:] = 1000
    q, gate = triton_fused.run(qkv, *norms, angles, *pools[0], slot, **settings)
    exact = [x.double() for x in (qkv, *norms, angles, *pools[1])]
    expected_q, expected_gate = attention_prologue.reference(*exact, slot, **settings)
    pairs = [(q, expected_q), *((ours[1:], theirs[1:]) for ours, theirs in zip(pools[0], exact[4:], strict=True))]
    if float8:
        rounded = pools[2].to(FLOAT8)
        triton_fused.run(qkv, *norms, angles, *rounded, slot, **settings)
        for ours, plain in zip(rounded, pools[0], strict=True):
            torch.testing.assert_close(
                ours[1:].float(), plain[1:].float().clamp(-448, 448), rtol=0.125, atol=2**-9, equal_nan=True
            )
    if gate is not None:
        pairs.append((gate, expected_gate))
    for ours, theirs in pairs:
        assert torch.equal(ours.isnan(), theirs.isnan())
        ours, theirs = ours.double().nan_to_num(0), theirs.nan_to_num(0)
        assert (ours - theirs).abs().max() <= TOLERANCE[dtype] * theirs.abs().max()
