from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.examples_a import normal, paged_batch

from firstlight.hardware import CPU_GENERIC, GPUS, Hardware
from firstlight.ops.attention import attention
from firstlight.ops.attention_prologue import attention_prologue
from firstlight.ops.cpu_native.providers import attention_when
from firstlight.ops.op import Call, Shape

SDPA = attention.providers["torch_sdpa"].run
RUNS = pytest.mark.parametrize("run", [attention.body, SDPA], ids=["reference", "torch_sdpa"])
BATCHES = [
    ([1], [1]),
    ([1, 1, 1], [5, 1, 9]),
    ([1, 1], [4, 64]),
    ([2, 3, 1], [5, 3, 9]),
    ([9, 1, 17], [9, 12, 33]),
    ([31], [32]),
]


def by_formula(
    batch: dict[str, torch.Tensor],
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token at a time, from the keys it may see, in float64."""
    q, k_pages, v_pages = (batch[name].double() for name in ("q", "k_pages", "v_pages"))
    size, group = k_pages.shape[1], q.shape[1] // k_pages.shape[2]
    out = torch.zeros_like(q)
    for r, length in enumerate(batch["length"].tolist()):
        begin, end = batch["query_start"][r : r + 2].tolist()
        table = batch["pages"][batch["row"][r]].tolist()
        for t in range(begin, end):
            i = length - (end - t)
            keys = [
                j
                for j in range(length)
                if table[j // size] > 0 and (not causal or j <= i) and (window == 0 or j > i - window)
            ]
            places = (
                torch.tensor([table[j // size] for j in keys]).long(),
                torch.tensor([j % size for j in keys]).long(),
            )
            k, v = (pool[places].repeat_interleave(group, dim=1) for pool in (k_pages, v_pages))  # [keys, H, D]
            scores = scale * (q[t] * k).sum(-1).t()  # [H, keys]
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : len(keys)]
            out[t] = (weights.t()[:, :, None] * v).sum(0)
    return out


def bounds(counts: list[int], lengths: list[int]) -> dict[str, Any]:
    """Static bounds, looser than the batch needs."""
    return {"scale": 0.3, "max_query": max(counts), "max_context": max(lengths) + 5}


@RUNS
@pytest.mark.parametrize("settings", [{}, {"window": 3}, {"causal": False}], ids=str)
@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize(("counts", "lengths"), BATCHES)
def test_formula(run: Any, counts: list[int], lengths: list[int], size: int, settings: dict[str, Any]) -> None:
    batch = paged_batch(counts, lengths, size=size, padding=2)
    out = run(*batch.values(), **bounds(counts, lengths), **settings)[: sum(counts)]
    expected = by_formula(batch, scale=0.3, **settings)[: sum(counts)]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@RUNS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.bfloat16, 0.03), (torch.float16, 4e-3)])
def test_dtypes(run: Any, dtype: torch.dtype, tolerance: float) -> None:
    for counts, lengths in BATCHES[1], BATCHES[4]:
        batch = paged_batch(counts, lengths, dtype=dtype)
        out = run(*batch.values(), **bounds(counts, lengths))
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), by_formula(batch, scale=0.3), rtol=0, atol=tolerance)


@RUNS
@pytest.mark.parametrize("settings", [{}, {"window": 3}, {"causal": False}], ids=str)
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize(("counts", "lengths"), BATCHES)
def test_float8_pages(run: Any, counts: list[int], lengths: list[int], size: int, settings: dict[str, Any]) -> None:
    """They are read as what they hold: nothing is rounded a second time."""
    batch = paged_batch(counts, lengths, size=size, padding=2, pages_dtype=torch.float8_e4m3fn)
    assert batch["k_pages"].double().isnan().any()
    out = run(*batch.values(), **bounds(counts, lengths), **settings)[: sum(counts)]
    assert out.dtype == torch.float32
    expected = by_formula(batch, scale=0.3, **settings)[: sum(counts)]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@RUNS
@pytest.mark.parametrize("count", [3, 12])
def test_float8_pages_of_a_block_major_pool_with_a_null_page(run: Any, count: int) -> None:
    batch = paged_batch([1, count], [13, 12], dtype=torch.bfloat16, pages_dtype=torch.float8_e4m3fn)
    batch["pages"][batch["row"][0], 1] = 0
    arena = torch.empty(len(batch["k_pages"]), 3, 2, 4, 2, 8, dtype=torch.float8_e4m3fn)
    arena.view(torch.uint8).fill_(0xFF)  # NaN
    arena[:, 1, 0], arena[:, 1, 1] = batch["k_pages"], batch["v_pages"]
    strided = batch | {"k_pages": arena[:, 1, 0], "v_pages": arena[:, 1, 1]}
    out = run(*strided.values(), **bounds([1, count], [13, 12]))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), by_formula(batch, scale=0.3), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("hardware", "reason"),
    [
        (GPUS["h200"], None),
        (GPUS["b200"], None),
        (GPUS["mi355x"], None),
        (GPUS["mi300x"], "the pages are float8_e4m3fn, and gfx942 converts e4m3fnuz"),
        (replace(GPUS["mi300x"], architecture="gfx90a"), "which gfx950 converts, not gfx90a"),
        (replace(GPUS["h200"], architecture="sm_80"), "which GPUs convert from sm_89 on, not sm_80"),
    ],
    ids=lambda value: getattr(value, "architecture", None),
)
def test_who_converts_float8_pages(hardware: Hardware, reason: str | None) -> None:
    hardware = replace(hardware, features=hardware.features | {"triton"})
    batch = paged_batch([1], [5], dtype=torch.bfloat16, pages_dtype=torch.float8_e4m3fn)
    reading = Call(tuple(batch.values()), bounds([1], [5]), None, hardware)
    pools = (batch["k_pages"], batch["v_pages"])
    qkv = normal(1, 80, dtype=torch.bfloat16)
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 8}
    writing = Call((qkv, None, None, normal(1, 4), *pools, torch.tensor([4])), sizes, None, hardware)
    for provider, call in (
        (attention.providers["triton_paged"], reading),
        (attention_prologue.providers["triton_fused"], writing),
    ):
        found = provider.when(call)
        assert found is None if reason is None else found is not None and reason in found


def test_the_cpu_kernels_refuse_float8_pages() -> None:
    batch = paged_batch([1], [5], dtype=torch.bfloat16, pages_dtype=torch.float8_e4m3fn)
    call = Call(tuple(batch.values()), bounds([1], [5]), None, CPU_GENERIC)
    assert "k_pages is torch.float8_e4m3fn" in str(attention_when(call))


@pytest.mark.parametrize("spread", [3, 200])
@pytest.mark.parametrize(("counts", "lengths"), [([1, 1], [5, 9]), ([9, 2], [9, 12])])
def test_sinks(counts: list[int], lengths: list[int], spread: int) -> None:
    batch, sinks = paged_batch(counts, lengths), normal(6) * spread
    out = attention(*batch.values(), **bounds(counts, lengths), sinks=sinks)
    torch.testing.assert_close(out.double(), by_formula(batch, scale=0.3, sinks=sinks), rtol=1e-5, atol=1e-5)


@RUNS
@pytest.mark.parametrize("count", [1, 11])
def test_null_pages_do_not_contribute(run: Any, count: int) -> None:
    """A freed page in the middle of a context, as a sliding window leaves it; and a context with no page at all."""
    batch = paged_batch([count, 1], [13, 6], padding=1)
    batch["pages"][batch["row"][0], 1] = 0
    batch["pages"][batch["row"][1]] = torch.tensor([-1, 0, 0, 0, 0], dtype=torch.int32)
    out = run(*batch.values(), **bounds([count, 1], [13, 6]))[: count + 1]
    torch.testing.assert_close(out.double(), by_formula(batch, scale=0.3)[: count + 1], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[count], torch.zeros_like(out[count]))


@RUNS
@pytest.mark.parametrize("count", [2, 11])
def test_result_can_be_written_in_place(run: Any, count: int) -> None:
    batch = paged_batch([count], [13])
    out = torch.full_like(batch["q"], torch.nan)
    assert run(*batch.values(), **bounds([count], [13]), out=out) is out
    assert torch.equal(out, run(*batch.values(), **bounds([count], [13])))


@RUNS
@pytest.mark.parametrize(("counts", "lengths"), BATCHES[1:5])
def test_batched_equals_alone(run: Any, counts: list[int], lengths: list[int]) -> None:
    batch = paged_batch(counts, lengths)
    together = run(*batch.values(), **bounds(counts, lengths))
    for r, count in enumerate(counts):
        begin = int(batch["query_start"][r])
        alone = batch | {
            "q": batch["q"][begin : begin + count],
            "row": batch["row"][r : r + 1],
            "length": batch["length"][r : r + 1],
            "query_start": torch.tensor([0, count]),
        }
        out = run(*alone.values(), scale=0.3, max_query=count, max_context=lengths[r])
        torch.testing.assert_close(out, together[begin : begin + count], rtol=1e-5, atol=1e-6)


@RUNS
def test_block_major_pools(run: Any) -> None:
    batch = paged_batch([1, 1, 12], [5, 9, 12])
    arena = torch.full((len(batch["k_pages"]), 3, 2, 4, 2, 8), torch.nan)  # [pages, layers, k or v, page size, KV, D]
    arena[:, 1, 0], arena[:, 1, 1] = batch["k_pages"], batch["v_pages"]
    strided = batch | {"k_pages": arena[:, 1, 0], "v_pages": arena[:, 1, 1]}
    settings = bounds([12], [12])
    assert torch.equal(run(*strided.values(), **settings), run(*batch.values(), **settings))


def test_sdpa_off_the_cpu_pads_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The padded path must not depend on reading the lengths: the bound is all that a graph has."""
    from firstlight.ops.attention import torch_sdpa

    monkeypatch.setattr(torch_sdpa, "longest_context", lambda length, max_context: max_context)
    batch = paged_batch([1, 2], [5, 9], padding=1)
    out = SDPA(*batch.values(), scale=0.3, max_query=2, max_context=9)
    torch.testing.assert_close(out[:3].double(), by_formula(batch, scale=0.3)[:3], rtol=1e-5, atol=1e-5)


def test_sdpa_refuses_what_torch_does_not_know() -> None:
    batch = paged_batch([1], [5])
    when = attention.providers["torch_sdpa"].when
    settings = bounds([1], [5])
    assert when(Call(tuple(batch.values()), settings, None, CPU_GENERIC)) is None
    assert "sinks" in str(when(Call(tuple(batch.values()), settings | {"sinks": normal(6)}, None, CPU_GENERIC)))
    batch["k_pages"] = batch["k_pages"].bfloat16()
    assert "pages are torch.bfloat16" in str(when(Call(tuple(batch.values()), settings, None, CPU_GENERIC)))


def test_cost_reads_each_context_once() -> None:
    args = [tensor.to("meta") for tensor in paged_batch([1, 1], [5, 9]).values()]
    shape = Shape(tokens=2, requests=2, keys_read=14, query_keys=14)
    cost = attention.cost(shape, *args, **bounds([1, 1], [5, 9]))
    assert cost.flops == {"float32": 2 * 2 * 14 * 6 * 8}
    assert cost.read == 2 * 6 * 8 * 4 + 14 * 2 * 8 * 4 * 2
    float8 = [pool.to("meta", torch.float8_e4m3fn) for pool in args[1:3]]
    halved = attention.cost(shape, args[0], *float8, *args[3:], **bounds([1, 1], [5, 9]))
    assert (halved.flops, halved.read) == (cost.flops, 2 * 6 * 8 * 4 + 14 * 2 * 8 * 2)
    windowed = attention.cost(shape, *args, **bounds([1, 1], [5, 9]), window=3)
    assert windowed.flops == {"float32": 2 * 2 * 6 * 6 * 8}
