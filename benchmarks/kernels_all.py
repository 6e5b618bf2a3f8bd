"""Every op of Qwen3.5-35B-A3B on one GPU: our providers, fla and torch, against the floor and the published figures.

    PYTHONPATH=src:tests python benchmarks/kernels_all.py [--only NAME] [--who NAME] [--kernels] [--json FILE]

Answers are checked against the op's reference first, row by row; what is wrong isn't timed, and what fails is said. Times are medians of calls in a CUDA graph
that take eight layers' weights, caches or routings in turn, and more where eight fit into the L2 cache. The floor is the
larger of the bytes that must move over the copy bandwidth measured in the same run, and the operations over the datasheet's
peak. `fla` is flash-linear-attention (pip install fla-core; it needs einops and triton), for the delta rule alone, without
the convolution, gates and norm that ours include. `torch` is torch's own product in bfloat16, or its attention over
contiguous keys. Published figures: see SOURCES.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton_mixers import gated_delta_inputs

import firstlight.ops  # noqa: F401  registers every op
from firstlight.calibrate.timing import copy_bandwidth, seconds_of
from firstlight.hardware import Hardware, detect
from firstlight.ops.op import REGISTRY, Call, Provider
from firstlight.quant import Format, Packed, Weight, unpack
from firstlight.step import Bucket

SOURCES = {
    "aic": "github.com/ai-dynamo/aiconfigurator, measured tables of h200_sxm (CUDA graphs)",
    "flashqla": "github.com/QwenLM/FlashQLA, README, H200",
    "flashinfer": "the same table, FlashInfer 0.6.13",
}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = torch.device("cuda")
LAYERS = 8
SIZES = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}

Run = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An op at a shape. calls: (args, kwargs) to take in turn. expected: the reference's first result for the first call.

    nbytes, operations: that any implementation must move, and do (in `multiply`). fresh: makes the first call anew, for ops that
    write in place. others: contenders that aren't providers, as calls and what they should give. published: us and the source.
    """

    op: str
    name: str
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    expected: Callable[[], Tensor] | None
    nbytes: float
    operations: float = 0.0
    multiply: str = "bfloat16"
    tolerance: float = 2e-2
    fresh: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    others: dict[str, tuple[list[Callable[[], Any]], Callable[[], Tensor] | None]] = field(default_factory=dict)
    published: tuple[float, str] | None = None


def first(result: Any) -> Tensor:
    """The first result of an op."""
    return result if isinstance(result, Tensor) else result[0]


def copies_of(nbytes: int, least: int = LAYERS) -> int:
    """How many copies leave the L2 cache before they come round."""
    l2 = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return max(least, min(64, math.ceil(3 * l2 / max(nbytes, 1))))


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def fp8(*shape: int) -> Packed:
    """Random FP8 weights in blocks of 128 x 128; products keep the size of their input."""
    data = (torch.randn(shape, device=DEVICE, dtype=BF16) * 100).clamp(-440, 440).to(FP8)
    blocks = (*shape[:-2], math.ceil(shape[-2] / 128), math.ceil(shape[-1] / 128))
    scale = ((torch.rand(blocks, device=DEVICE) + 0.5) * shape[-1] ** -0.5 / 100).to(BF16)
    return Packed({"data": data, "scale": scale}, Format("float8_e4m3fn", (128, 128), "bfloat16"), shape)


# Products


def linears() -> Iterator[Case]:
    published = {
        (12288, 1): 11.6, (12288, 64): 15.2, (12288, 128): 13.3, (12288, 256): 19, (12288, 1024): 45, (12288, 8192): 369,
        (2048, 1): 9.5, (2048, 128): 9.6, (2048, 8192): 122, (1024, 1): 6,
    }  # fmt: skip
    for rows, columns in ((12288, 2048), (9216, 2048), (2048, 4096), (1024, 2048)):
        weights = [fp8(rows, columns) for _ in range(copies_of(rows * columns))]
        plain = [unpack(weight, BF16) for weight in weights[:LAYERS]]
        for tokens in (1, 2, 8, 16, 32, 64, 128, 256, 1024, 8192):
            if tokens in (2, 16, 64, 256) and rows != 12288:
                continue
            x = normal(tokens, columns)
            figure = published.get((rows, tokens))
            yield Case(
                "linear", f"fp8 {rows}x{columns} T={tokens}", [((x, weight), {}) for weight in weights],
                lambda x=x, w=weights[0]: x.float() @ unpack(w, torch.float32).t(),
                rows * columns + 2.0 * tokens * (rows + columns), 2.0 * tokens * rows * columns, "float8_e4m3fn", 4e-2,
                others={"torch": ([partial(functional.linear, x, w) for w in plain], None)},
                published=(figure, "aic") if figure else None,
            )  # fmt: skip
        del weights, plain
    for rows, tokens in ((256, 1), (256, 32), (248320, 1), (248320, 32), (248320, 128)):
        dense = [normal(rows, 2048) for _ in range(copies_of(rows * 4096, LAYERS if rows < 1000 else 1))]
        x = normal(tokens, 2048)
        yield Case(
            "linear", f"bf16 {rows}x2048 T={tokens}", [((x, weight), {}) for weight in dense],
            lambda x=x, w=dense[0]: x.float() @ w.float().t(),
            dense[0].nbytes + 2.0 * tokens * (rows + 2048), 2.0 * tokens * rows * 2048,
        )  # fmt: skip


def mixtures() -> Iterator[Case]:
    """256 experts, top 8, hidden 2048, intermediate 512, uniform routing; alone, and with router and shared expert."""
    gate_up, down = fp8(256, 1024, 2048), fp8(256, 2048, 512)
    shared: list[Weight] = [fp8(1024, 2048), fp8(2048, 512)]
    router, gate = normal(256, 2048), normal(1, 2048)
    plain = unpack(gate_up, BF16), unpack(down, BF16)
    published = {1: 24, 2: 34, 4: 49, 8: 75, 128: 209, 1024: 286, 8192: 955}
    for tokens in (1, 2, 4, 8, 32, 128, 256, 1024, 8192):
        count = LAYERS if tokens < 1000 else 1
        xs = [normal(tokens, 2048) for _ in range(count)]
        routed = [
            (
                torch.rand(tokens, 8, device=DEVICE).softmax(-1).to(BF16),
                torch.rand(tokens, 256, device=DEVICE).topk(8)[1].int(),
            )
            for _ in range(count)
        ]
        touched = sum(len(chosen.unique()) for _, chosen in routed) / count
        nbytes, work = touched * 3 * 2**20 + tokens * 8192, tokens * 8 * 6.0 * 2048 * 512
        calls: list[Any] = [((x, *choice, gate_up, down), {}) for x, choice in zip(xs, routed, strict=True)]
        figure = published.get(tokens)
        grouped = REGISTRY["experts"].providers["torch_grouped"].run
        yield Case(
            "experts", f"T={tokens}", calls, partial(_reference, "experts", calls[0]), nbytes, work, "float8_e4m3fn", 8e-2,
            others={"torch": ([partial(grouped, x, *c, *plain) for x, c in zip(xs, routed, strict=True)], None)},
            published=(figure, "aic") if figure else None,
        )  # fmt: skip
        options = {"live": torch.tensor([tokens], device=DEVICE, dtype=torch.int32), "top_k": 8, "renormalise": True}
        calls = [((x, router, gate_up, down, *shared, gate), options) for x in xs]
        expected = 256 * (1 - (1 - 8 / 256) ** tokens)
        yield Case(
            "moe", f"T={tokens}", calls, partial(_reference, "moe", calls[0]), expected * 3 * 2**20 + 4 * 2**20 + tokens * 8192,
            work + tokens * 6.0 * 2048 * 512, "float8_e4m3fn", 0.6 if tokens > 1 else 1.0,
        )  # fmt: skip


def _reference(op: str, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
    return first(REGISTRY[op].reference(*call[0], **call[1]))


def rows() -> Iterator[Case]:
    """Ops bound by a few bytes: norms, activations, the router's choice, sampling."""
    for tokens in (1, 128, 8192):
        x, y, heads, gates = (
            normal(tokens, 2048),
            normal(tokens, 2048),
            normal(tokens, 32, 128),
            normal(tokens, 32, 128),
        )
        weight, head_weight = normal(2048), torch.randn(128, device=DEVICE)
        norm = {"eps": 1e-6, "zero_centred": True}
        for op, args, options, nbytes in (
            ("route", (normal(tokens, 256),), {"top_k": 8, "renormalise": True}, tokens * 560),
            ("rms_norm", (x, weight), norm, tokens * 8192),
            ("add_rms_norm", (x, y, weight), norm, tokens * 16384),
            ("gated_rms_norm", (heads, gates, head_weight), {"eps": 1e-6}, tokens * 4096 * 6),
            ("silu_mul", (x,), {}, tokens * 6144),
        ):
            yield Case(op, f"T={tokens}", [(args, options)] * LAYERS, partial(_reference, op, (args, options)), nbytes)
    for count in (1, 128):
        number, share = torch.arange(count, device=DEVICE), torch.full((count,), 0.7, device=DEVICE)
        calls = [
            (normal(count, 248320), share, torch.full_like(number, 50), share, number, number) for _ in range(LAYERS)
        ]
        for name, options in (
            ("greedy", {"greedy": True, "filtered": False}), ("drawn", {"filtered": False}), ("top-k, top-p", {}),
        ):  # fmt: skip
            yield Case(
                "sample", f"{name} {count} x 248320", [(args, options) for args in calls],
                partial(_reference, "sample", (calls[0], options)), calls[0][0].nbytes, tolerance=1e-9,
            )  # fmt: skip


# Mixers


def delta() -> Iterator[Case]:
    """Whole mixers of Gated DeltaNet (convolution, gates, rule, gated norm); fla: the rule alone."""
    published = {1: 4.7, 8: 9.4, 64: 71.5, 128: 137, 256: 267}
    for batch, state_dtype in itertools.product((1, 8, 32, 64, 128, 256), (torch.float32, BF16)):
        ids, whole = list(range(1, batch + 1)), state_dtype == torch.float32
        make = partial(
            gated_delta_inputs, [1] * batch, ids, ids, dtype=BF16, state_dtype=state_dtype, device=str(DEVICE), padding=0,
            **SIZES,
        )  # fmt: skip
        args, kwargs = make()
        state = args[9][1:].nbytes
        count = copies_of(2 * state)
        windows = args[8].unsqueeze(1).repeat(1, count, 1, 1)
        states = args[9].unsqueeze(1).repeat(1, count, 1, 1, 1)
        calls = [((*args[:8], windows[:, i], states[:, i], *args[10:]), kwargs) for i in range(count)]
        figure = published.get(batch)
        yield Case(
            "gated_delta", f"decode B={batch}{'' if whole else ', bf16 states'}", calls, partial(_fresh_reference, make),
            2.0 * state, fresh=make, others=_fla_decode(batch, count) if whole else {},
            published=(figure, "aic") if figure and whole else None,
        )  # fmt: skip
        del windows, states, calls
    for counts, figure, source in (([8192], 280.0, "flashqla"), ([1024] * 8, 119.0, "flashinfer")):
        ids = list(range(1, len(counts) + 1))
        make = partial(
            gated_delta_inputs, counts, [0] * len(ids), ids, dtype=BF16, device=str(DEVICE), padding=0, **SIZES
        )
        yield Case(
            "gated_delta", f"prefill {len(counts)}x{counts[0]}", [make()], partial(_fresh_reference, make),
            8192.0 * (8192 + 4096 + 4096) * 2, tolerance=5e-2, fresh=make, others=_fla_prefill(len(counts), counts[0]),
            published=(figure, source),
        )  # fmt: skip


def _fresh_reference(make: Callable[[], Any]) -> Tensor:
    args, kwargs = make()
    return first(REGISTRY["gated_delta"].reference(*args, **kwargs))


def _rule_inputs(requests: int, tokens: int) -> dict[str, Tensor]:
    """What fla takes, [R, T, heads, ...]: normalised q and k, decays and beta as a layer makes them."""
    q, k = (functional.normalize(normal(requests, tokens, 16, 128, dtype=torch.float32), dim=-1).to(BF16) for _ in "qk")
    g = -torch.rand(requests, tokens, 32, device=DEVICE)
    beta = torch.rand(requests, tokens, 32, device=DEVICE)
    return {"q": q, "k": k, "v": normal(requests, tokens, 32, 128), "g": g, "beta": beta}


def _rule_reference(inputs: dict[str, Tensor], state: Tensor | None) -> Tensor:
    """The rule's reference on the same inputs; state [R, HV, V, K] or None."""
    requests, tokens = inputs["q"].shape[:2]
    flat = {name: x.flatten(0, 1) for name, x in inputs.items()}
    pool = torch.zeros(requests + 1, 32, 128, 128, device=DEVICE)
    if state is not None:
        pool[1:] = state
    slot = torch.arange(1, requests + 1, device=DEVICE, dtype=torch.int32)
    start = torch.arange(requests + 1, device=DEVICE, dtype=torch.int32) * tokens
    none = torch.zeros((0, 3), dtype=torch.int32, device=DEVICE)
    return REGISTRY["gated_delta_rule"].reference(
        (flat["q"].float() * 128**-0.5).to(BF16), flat["k"], flat["v"], flat["g"], flat["beta"], pool, start, slot, slot,
        none, max_query=tokens,
    )  # fmt: skip


@cache
def _fla() -> Any:
    try:
        from fla.ops import gated_delta_rule
    except Exception as failure:  # whatever it makes of this Triton
        print(f"without fla: {brief(failure)}", flush=True)
        return None
    return gated_delta_rule


def _fla_decode(batch: int, count: int) -> dict[str, Any]:
    if (fla := _fla()) is None:
        return {}
    inputs = _rule_inputs(batch, 1)
    states = [torch.randn(batch, 32, 128, 128, device=DEVICE) * 0.3 for _ in range(count)]
    call = partial(fla.fused_recurrent_gated_delta_rule, **inputs, output_final_state=True, state_v_first=True)
    return {
        "fla": ([partial(call, initial_state=state) for state in states], partial(_rule_reference, inputs, states[0]))
    }


def _fla_prefill(requests: int, tokens: int) -> dict[str, Any]:
    if (fla := _fla()) is None:
        return {}
    inputs = _rule_inputs(requests, tokens)
    call = partial(fla.chunk_gated_delta_rule, **inputs, output_final_state=True, state_v_first=True)
    return {"fla": ([call], partial(_rule_reference, inputs, None))}


PAGES = {"": BF16, ", FP8 pages": FP8}
ATTENTION_TOLERANCE = 3 * 2.0**-9
"""In bfloat16, relative to a row: a provider rounds its probabilities and its answer, the reference its own answer. FP8 pages add
nothing, since both read the same ones, exactly."""


def attention() -> Iterator[Case]:
    """GQA 16/2, heads of 256, over scattered pages of 64; torch's attention over contiguous keys."""
    published = {1: 15.6, 8: 30.4, 32: 77.7, 64: 136, 128: 261}
    for batch in (1, 8, 32, 64, 128):
        k, v = (normal(batch, 2, 4096, 256) for _ in "kv")
        q = normal(batch, 16, 1, 256)
        beside = partial(functional.scaled_dot_product_attention, q, k, v, enable_gqa=True)
        for name, dtype in PAGES.items():
            nbytes = batch * 4096 * 1024 * dtype.itemsize
            calls = _paged(batch, 1, 4096, copies_of(nbytes, 4), dtype)
            yield Case(
                "attention", f"decode B={batch} context 4096{name}", calls, partial(_reference, "attention", calls[0]),
                float(nbytes), 4.0 * batch * 4096 * 16 * 256, tolerance=ATTENTION_TOLERANCE,
                others={"torch": ([beside], None)} if dtype == BF16 else {},
                published=(published[batch], "aic") if dtype == BF16 else None,
            )  # fmt: skip
            del calls
        del k, v
    q, k, v = normal(1, 16, 8192, 256), normal(1, 2, 8192, 256), normal(1, 2, 8192, 256)
    beside = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    for name, dtype in PAGES.items():
        calls = _paged(1, 8192, 8192, 1, dtype)
        yield Case(
            "attention", f"prefill 1x8192{name}", calls, partial(_reference, "attention", calls[0]),
            8192.0 * 1024 * dtype.itemsize, 2.0 * 8192**2 * 16 * 256, tolerance=ATTENTION_TOLERANCE,
            others={"torch": ([beside], None)} if dtype == BF16 else {},
            published=(796.0, "aic") if dtype == BF16 else None,
        )  # fmt: skip


def _paged(batch: int, query: int, context: int, layers: int, dtype: torch.dtype = BF16) -> list[Any]:
    page, columns = 64, context // 64
    table = (torch.randperm(batch * columns, device=DEVICE) + 1).int().view(batch, columns)
    pool = torch.empty(batch * columns + 1, layers, 2, page, 2, 256, device=DEVICE, dtype=dtype)
    for layer in range(layers):
        values = normal(batch * columns + 1, 2, page, 2, 256)
        values[0] = math.nan
        pool[:, layer] = values.to(dtype)
    q = normal(batch * query, 16, 256)
    start = (torch.arange(batch + 1, device=DEVICE) * query).int()
    rest = (table, torch.arange(batch, device=DEVICE).int(), start, torch.full((batch,), context, device=DEVICE).int())
    settings = {"scale": 256**-0.5, "max_query": query, "max_context": context}
    return [((q, pool[:, i, 0], pool[:, i, 1], *rest), settings) for i in range(layers)]


def prologues() -> Iterator[Case]:
    """Norms of q and k, rotary embedding, gate split and the write to the cache."""
    sizes = {"heads": 16, "kv_heads": 2, "head_dim": 256, "gated": True, "zero_centred": True}
    for tokens in (1, 128, 8192):
        pool = torch.zeros(tokens // 64 + 2, 2, 64, 2, 256, device=DEVICE, dtype=BF16)
        slot, angles = torch.randperm(tokens, device=DEVICE) + 64, torch.randn(tokens, 64, device=DEVICE)
        rest = (normal(256), normal(256), angles, pool[:, 0], pool[:, 1], slot)
        calls = [((normal(tokens, 9216), *rest), sizes) for _ in range(LAYERS)]
        expected = partial(_reference, "attention_prologue", calls[0])
        yield Case("attention_prologue", f"T={tokens}", calls, expected, tokens * 2.0 * 2 * 9216)


GROUPS = (linears, mixtures, rows, attention, prologues, delta)
"""The last is the one whose contender tries out its configurations for long."""


@dataclass(frozen=True)
class Contender:
    """calls: to be timed, in turn. answer: runs the first one. expected: makes what it should give, or None."""

    name: str
    calls: list[Callable[[], Any]]
    answer: Callable[[], Tensor]
    expected: Callable[[], Tensor] | None


def contenders(case: Case, hardware: Hardware, who: str) -> Iterator[Contender]:
    """The providers that can serve the case, then the others; those whose names contain `who`."""
    expected = cache(case.expected) if case.expected else None
    for provider in willing(case, hardware, who):
        calls: list[Callable[[], Any]] = [partial(provider.run, *a, **k) for a, k in case.calls]
        yield Contender(provider.name, calls, partial(_answer, provider.run, case), expected)
    for name, (calls, should_be) in case.others.items():
        if who in name:
            yield Contender(name, calls, lambda call=calls[0]: first(call()), should_be)


def willing(case: Case, hardware: Hardware, who: str) -> list[Provider]:
    """The providers that can serve the case, of those whose names contain `who`."""
    call = Call(*case.calls[0], Bucket(), hardware)
    return [p for p in REGISTRY[case.op].providers.values() if who in p.name and p.when(call) is None]


def compile_kernels(cases: Iterable[Case], hardware: Hardware, who: str) -> None:
    """Run every provider once, side by side, so that kernels are compiled on all cores. Those that fail, fail again later."""

    def warm(run: Run, case: Case) -> None:
        with suppress(Exception), torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            run(*case.calls[0][0], **case.calls[0][1])
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()  # other streams read what this one has written
    jobs = [partial(warm, provider.run, case) for case in cases for provider in willing(case, hardware, who)]
    for job in jobs[:1]:  # sets up what threads would otherwise set up at once
        job()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda job: job(), jobs[1:]))
    torch.cuda.empty_cache()


def _answer(run: Run, case: Case) -> Tensor:
    args, kwargs = case.fresh() if case.fresh else case.calls[0]
    return first(run(*args, **kwargs))


SMALL_ROW = 0.25
"""Of the RMS of all: a row that is smaller, since what it adds up cancels, counts as this large."""


def error(actual: Tensor, expected: Tensor | None) -> float:
    """The worst row's RMS error over that row's own RMS; 0 where there is nothing to compare with.

    A prompt's attention needs each row's own: the first tokens see a key or two, the last average thousands, and are fifty times
    smaller. Over the RMS of all, one rounding to bfloat16 in the first rows is an error of 4e-2.
    """
    if expected is None:
        return 0.0
    actual, expected = (
        t.float().reshape(-1, t.shape[-1]) if t.dim() > 1 else t.double()[:, None] for t in (actual, expected)
    )
    size = expected.square().mean(-1).sqrt()
    usual = expected.square().mean().sqrt()
    return float(((actual - expected).square().mean(-1).sqrt() / size.clamp(min=SMALL_ROW * usual)).max())


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Where the time of a call of several kernels goes: us by kernel, as the profiler counts them."""
    runs = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    return {event.key[:60]: event.device_time * event.count / runs for event in profile.key_averages()}


def brief(failure: Exception) -> str:
    """An exception on a line."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:120]}"


def measure(case: Case, hardware: Hardware, bandwidth: float, who: str, kernels: bool) -> Iterator[dict[str, Any]]:
    """A row for each contender; of one that fails, with the reason."""
    floor = max(case.nbytes / bandwidth, case.operations / hardware.peak[case.multiply])
    for contender in contenders(case, hardware, who):
        row: dict[str, Any] = {"op": case.op, "shape": case.name, "who": contender.name, "floor_us": floor * 1e6}
        if case.published:
            row |= {"published_us": case.published[0], "source": SOURCES[case.published[1]]}
        try:
            row["error"] = error(contender.answer(), contender.expected() if contender.expected else None)
            if not row["error"] <= case.tolerance:
                yield row | {"wrong": True}
                continue
            for call in contender.calls:
                call()
            seconds = seconds_of(contender.calls, DEVICE)
            if kernels:
                row["kernels_us"] = kernel_times(contender.calls[0])
        except Exception as failure:  # a compiler's, a kernel's, or of memory: the others go on
            yield row | {"failed": brief(failure)}
            continue
        yield row | {
            "us": seconds * 1e6,
            "share": floor / seconds,
            "tb_s": case.nbytes / seconds / 1e12,
            "tflops": case.operations / seconds / 1e12,
        }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    name = f"{row['op']} {row['shape']}: {row['who']}"
    if "us" not in row:
        why = f"WRONG by {row['error']:.1e}, not timed" if "wrong" in row else f"FAILED: {row['failed']}"
        return f"{name:62s} {why}"
    published = f"{row['published_us']:9.1f}" if "published_us" in row else ""
    kernels = "".join(f"\n    {us:9.2f}  {name}" for name, us in row.get("kernels_us", {}).items())
    return (
        f"{name:62s} {row['us']:9.2f} {row['floor_us']:8.2f} {row['share']:5.0%} {row['tb_s']:5.2f} {row['tflops']:5.0f}"
        f" {row['error']:8.1e} {published}{kernels}"
    )


def cases_of(group: Callable[[], Iterator[Case]], only: str) -> list[Case]:
    """The cases of a group whose names contain `only`, up to the first whose inputs can't be made."""
    found = []
    try:
        for case in group():
            if only in f"{case.op} {case.name}":
                found.append(case)
    except Exception as failure:
        after = f" after {found[-1].name}" if found else ""
        print(f"{group.__name__}: FAILED to make the cases{after}: {brief(failure)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose `op shape` contains this")
    parser.add_argument("--who", default="", help="contenders whose name contains this")
    parser.add_argument("--kernels", action="store_true", help="also where each call's time goes, by kernel")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    hardware, bandwidth = detect("cuda"), copy_bandwidth(DEVICE)
    print(f"{hardware.name}, torch {torch.__version__}: copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'':62s} {'us':>9s} {'floor':>8s} {'share':>5s} {'TB/s':>5s} {'TF':>5s} {'error':>8s} {'published':>9s}")
    about = {"gpu": hardware.name, "torch": torch.__version__, "copy_tb_s": bandwidth / 1e12, "sources": SOURCES}
    found = []
    with torch.inference_mode():
        for group in GROUPS:
            cases = cases_of(group, options.only)
            compile_kernels(cases, hardware, options.who)
            while cases:
                for row in measure(cases.pop(0), hardware, bandwidth, options.who, options.kernels):
                    print(line(row), flush=True)
                    found.append(row)
                torch.cuda.empty_cache()
            if options.json:  # after every group: a run that is stopped leaves what it has
                options.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
