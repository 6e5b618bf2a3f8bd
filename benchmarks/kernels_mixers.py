"""Kernels of the mixers on one GPU: Gated DeltaNet and attention at the shapes of Qwen3.5-35B-A3B.

Each row: the time of one call inside a CUDA graph whose calls go through as many layers as it takes to leave the L2 cache,
the floor (bytes over the copy bandwidth measured in the same run), and the published figure. Answers are checked first.

    PYTHONPATH=src:tests python benchmarks/kernels_mixers.py [decode] [attention] [prologue] [prefill]
"""

# ruff: noqa: B023  (what is timed in an iteration is called in it)
from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from triton_mixers import errors, gated_delta_inputs

from firstlight.ops.attention import attention, triton_paged
from firstlight.ops.attention_prologue import attention_prologue, triton_fused
from firstlight.ops.gated_delta import triton_chunked, triton_decode

REAL = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
DEVICE = "cuda"
COLD_BYTES = 256 * 2**20


def graph_time(call: Callable[[int], Any], layers: int, replays: int = 7) -> float:
    """Seconds of one of `layers` calls in a graph: the median over replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(3, layers)):
            call(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(layers):
            call(i)
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / layers)
    return median(times[1:])


def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, reads and writes counted."""
    source = torch.randn(2**28, device=DEVICE)
    target = torch.empty_like(source)
    seconds = graph_time(lambda _: torch.neg(source, out=target), 4)
    return 2 * source.nbytes / seconds


def report(name: str, seconds: float, floor: float, published: str = "") -> None:
    print(
        f"{name:44s} {seconds * 1e6:9.2f} us  floor {floor * 1e6:8.2f}  {floor / seconds:5.0%}  {published}", flush=True
    )


def decode(bandwidth: float, variants: bool) -> None:
    tiles = triton_decode.Tiles
    args, kwargs = gated_delta_inputs(
        [1] * 5 + [0],
        [1, 2, 0, 2, 5, 4],
        [1, 3, 6, 0, 5, 7],
        dtype=torch.bfloat16,
        device=DEVICE,
        exports=((0, 1, 8), (1, 0, 9), (2, 0, 0)),
        **REAL,
    )
    candidates = [
        tiles("sliced", 32, 4),
        tiles("sliced", 16, 4),
        tiles("streamed", 8, 1, 80),
        tiles("streamed", 16, 4, 64),
    ]
    for cut in candidates:
        found = errors(lambda *a, cut=cut, **k: triton_decode.run(*a, **k, tiles=cut), args, kwargs)
        print("decode errors", cut, found, flush=True)
    published = {1: "4.7", 8: "9.4", 64: "71.5", 128: "137", 256: "267"}
    for batch in (1, 2, 4, 8, 64, 128, 256):
        ids = list(range(1, batch + 1))
        args, kwargs = gated_delta_inputs([1] * batch, ids, ids, dtype=torch.bfloat16, device=DEVICE, padding=0, **REAL)
        state = args[9][1:].nbytes
        layers = min(128, max(8, COLD_BYTES // state))
        windows = args[8].unsqueeze(1).repeat(1, layers, 1, 1)
        states = args[9].unsqueeze(1).repeat(1, layers, 1, 1, 1)
        cuts = [triton_decode.choose_tiles(batch * 32, 128, 128, dependent=True)]
        if variants:
            cuts += candidates
        for cut in cuts:

            def call(i: int) -> Any:
                return triton_decode.run(*args[:8], windows[:, i], states[:, i], *args[10:], **kwargs, tiles=cut)

            seconds = graph_time(call, layers)
            report(
                f"gated_delta decode B={batch} {cut.rows}/{cut.warps}{', norm' * cut.norm}{', dependent' * cut.dependent} {2 * state / seconds / 1e12:.2f} TB/s",
                seconds,
                2 * state / bandwidth,
                f"rule alone {published.get(batch, '')}",
            )


def kernel_times(call: Callable[[], Any]) -> None:
    """Where the time of a call of several kernels goes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    for event in profile.key_averages():
        print(f"    {event.key[:40]:40s} {event.device_time:9.1f} us", flush=True)


def prefill(bandwidth: float, variants: bool) -> None:
    args, kwargs = gated_delta_inputs(
        [200, 64, 1, 0],
        [1, 0, 2, 4],
        [1, 3, 5, 6],
        exports=((0, 64, 7), (0, 130, 8), (1, 64, 9)),
        dtype=torch.bfloat16,
        device=DEVICE,
        **REAL,
    )
    cut = triton_chunked.Cut
    candidates = [
        cut(64, 4, 2),
        cut(128, 8, 2),
        cut(128, 8, 2, 1, True),
        cut(128, 8, 2, 2, True),
        cut(128, 8, 2, 4, True),
    ]
    for c in candidates:
        found = errors(lambda *a, c=c, **k: triton_chunked.run(*a, **k, cut=c), args, kwargs, exact=False)
        print("prefill errors", c, found, flush=True)
    for counts, published in (([8192], ".28 rule alone"), ([1024] * 8, ".12 rule alone")):
        ids = list(range(1, len(counts) + 1))
        args, kwargs = gated_delta_inputs(
            counts, [0] * len(ids), ids, dtype=torch.bfloat16, device=DEVICE, padding=0, **REAL
        )
        floor = sum(counts) * (8192 + 4096 + 4096) * 2 / bandwidth
        chosen = triton_chunked.choose_cut(sum(counts), len(counts), 32, 128, counts[0], exact=False)
        for c in [chosen, *(candidates if variants else [])]:

            def call(i: int = 0) -> Any:
                return triton_chunked.run(*args, **kwargs, cut=c)

            name = f"{c.values} values, {c.segments} segments{', norm' * c.norm}"
            report(f"gated_delta prefill {len(counts)}x{counts[0]} {name}", graph_time(call, 4), floor, published)
            kernel_times(call)


def paged(
    batch: int,
    context: int,
    layers: int,
    page: int = 64,
    queries: int = 1,
    heads: int = 16,
    kv_heads: int = 2,
    dim: int = 256,
) -> tuple[list[Any], torch.Tensor]:
    count = -(-context // page)
    order = (torch.randperm(batch * count, device=DEVICE) + 1).int().view(batch, count)
    pool = torch.empty(batch * count + 1, layers, 2, page, kv_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    for i in range(layers):
        pool[:, i].normal_()
    pool[0] = float("nan")
    q = torch.randn(batch * queries, heads, dim, device=DEVICE).bfloat16()
    start = (torch.arange(batch + 1, device=DEVICE) * queries).int()
    length = torch.full((batch,), context, device=DEVICE).int()
    return [q, order, torch.arange(batch, device=DEVICE).int(), start, length], pool


def attend(bandwidth: float, variants: bool) -> None:
    tiles = triton_paged.Tiles
    for batch, published in ((1, "15.6"), (8, "30.4"), (32, "77.7"), (128, "261")):
        layers = {1: 32, 8: 8, 32: 4, 128: 4}[batch]
        (q, *indices), pool = paged(batch, 4096, layers)
        settings = {"scale": 256**-0.5, "max_query": 1, "max_context": 4096}
        ours = triton_paged.run(q, pool[:, 0, 0], pool[:, 0, 1], *indices, **settings)
        expected = attention.reference(q, pool[:, 0, 0], pool[:, 0, 1], *indices, **settings)
        error = float((ours.double() - expected.double()).norm() / expected.double().norm())
        chosen = triton_paged.choose_tiles(q, pool[:, 0, 0], batch, 1, 4096, 132)
        candidates = [chosen]
        if variants:
            splits = {1: (32, 64), 8: (8, 16), 32: (2, 4, 8), 128: (1, 2)}[batch]
            candidates += [
                tiles(1, 16, n, s, w, st)
                for s in splits
                for n, w, st in ((32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 8, 3), (32, 2, 3))
            ]
        for cut in candidates:
            seconds = graph_time(
                lambda i, cut=cut: triton_paged.run(q, pool[:, i, 0], pool[:, i, 1], *indices, **settings, tiles=cut),
                layers,
            )
            report(
                f"attention decode B={batch} s={cut.splits} n={cut.keys} w={cut.warps} st={cut.stages} e={error:.0e}",
                seconds,
                2 * pool[1:, 0, 0].nbytes / bandwidth,
                published,
            )


def attend_prefill(variants: bool) -> None:
    """Beside torch's attention over the same keys, which needs them repeated for each head."""
    tiles = triton_paged.Tiles
    (q, *indices), pool = paged(1, 8192, 1, queries=8192)
    settings = {"scale": 256**-0.5, "max_query": 8192, "max_context": 8192}
    k, v = (
        pool[indices[0].flatten().long(), 0, i].flatten(0, 1).repeat_interleave(8, 1).transpose(0, 1) for i in (0, 1)
    )
    theirs = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], is_causal=True)
    expected = theirs[0].transpose(0, 1).double()
    operations = 2 * 8192**2 * 16 * 256
    seconds = graph_time(
        lambda _: torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None], v[None], is_causal=True
        ),
        2,
    )
    print(f"attention prefill 1x8192, torch {seconds * 1e6:.0f} us, {operations / seconds / 1e12:.0f} TFLOP/s")
    cuts = [triton_paged.choose_tiles(q, pool[:, 0, 0], 1, 8192, 8192, 132)]
    if variants:
        cuts += [
            tiles(16, 128, 32, 1, 8, 3),
            tiles(8, 64, 64, 1, 4, 2),
            tiles(16, 128, 64, 1, 4, 2),
            tiles(16, 128, 128, 1, 8, 1),
        ]
    for cut in cuts:
        call = lambda _=0, cut=cut: triton_paged.run(q, pool[:, 0, 0], pool[:, 0, 1], *indices, **settings, tiles=cut)  # noqa: E731
        error = float((call().double() - expected).norm() / expected.norm())
        seconds = graph_time(call, 2)
        print(
            f"attention prefill 1x8192 {cut} e={error:.0e} {seconds * 1e6:.0f} us, {operations / seconds / 1e12:.0f} TFLOP/s",
            flush=True,
        )


def prologue(bandwidth: float) -> None:
    sizes = {"heads": 16, "kv_heads": 2, "head_dim": 256, "gated": True, "zero_centred": True}
    for tokens in (1, 128, 8192):
        pool = torch.zeros(tokens // 64 + 2, 2, 64, 2, 256, device=DEVICE, dtype=torch.bfloat16)
        layers = 4 if tokens > 1000 else 32
        qkv = torch.randn(layers, tokens, 9216, device=DEVICE).bfloat16()
        norms = [torch.randn(256, device=DEVICE).bfloat16() for _ in "qk"]
        angles = torch.randn(tokens, 64, device=DEVICE)
        slot = torch.randperm(tokens, device=DEVICE) + 64

        def call(i: int, run: Any = triton_fused.run, pool: Any = pool) -> Any:
            return run(qkv[i], *norms, angles, pool[:, 0], pool[:, 1], slot, **sizes)

        other = torch.zeros_like(pool)
        (q, gate), (q2, gate2) = call(0), call(0, attention_prologue.reference, other)
        worst = [float((x.float() - y.float()).abs().max()) for x, y in ((q, q2), (gate, gate2), (pool, other))]
        report(f"prologue T={tokens} errors {worst}", graph_time(call, layers), 2 * qkv[0].nbytes / bandwidth)


def main(parts: list[str]) -> None:
    bandwidth = copy_bandwidth()
    print(torch.cuda.get_device_name(), f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    variants = "variants" in parts
    if "decode" in parts:
        decode(bandwidth, variants)
    if "prefill" in parts:
        prefill(bandwidth, variants)
    if "attention" in parts:
        attend(bandwidth, variants)
    if "attention_prefill" in parts:
        attend_prefill(variants)
    if "prologue" in parts:
        prologue(bandwidth)


if __name__ == "__main__":
    main(sys.argv[1:] or ["decode", "attention", "prologue", "prefill"])
