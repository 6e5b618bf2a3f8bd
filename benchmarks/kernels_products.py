"""Products, experts, routing, norms and sampling on one GPU: cold, in a CUDA graph, against the floor and torch.

    python benchmarks/kernels_products.py [--only NAME]

Each row is checked against the op's reference before it is timed. A graph holds 48 calls that rotate over eight copies of
the weights (or eight routings), so that no call finds its weights in L2; the time is the median replay over the calls.
floor: bytes that the op's cost counts over the copy bandwidth measured first, or its operations over the dense FP8 peak.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

import firstlight.ops  # noqa: F401  registers every op
from firstlight.ops.op import REGISTRY
from firstlight.quant import Packed, unpack
from firstlight.quant.format import Format

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CALLS = 48
PEAK = 1979e12
"""Dense FP8 operations a second: H200's datasheet."""


@dataclass(frozen=True)
class Row:
    """calls: rotated over; each gives what `expected` gives, within `tolerance` of its RMS. published: us, elsewhere."""

    name: str
    calls: list[Callable[[], Tensor]]
    expected: Callable[[], Tensor] | None
    nbytes: float
    operations: float = 0
    tolerance: float = 1e-2
    published: str = ""
    must: str = ""


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Median time of a call inside a graph of CALLS of them."""
    calls = (calls * CALLS)[: max(CALLS, len(calls))]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:8]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(13):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay > 2:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.randn(2**29, device="cuda", dtype=BF16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds([lambda: torch.mul(source, 1, out=target)]) * 1e6


def fp8(*shape: int) -> Packed:
    """Random FP8 weights in blocks of 128 x 128, of about 1 / sqrt(2048)."""
    data = (torch.randn(shape, device="cuda", dtype=BF16) * 100).clamp(-440, 440).to(FP8)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scale = ((torch.rand(blocks, device="cuda") + 0.5) * 2.2e-4).to(BF16)
    return Packed({"data": data, "scale": scale}, Format("float8_e4m3fn", (128, 128), "bfloat16"), shape)


def run_of(op: str, provider: str) -> Callable[..., Tensor]:
    return REGISTRY[op].providers[provider].run


def linears() -> Iterator[Row]:
    published = {(12288, 1): ("11.6", "9"), (12288, 8192): ("369", "400"), (2048, 1): ("9.5", "")}
    for rows, columns in ((12288, 2048), (9216, 2048), (2048, 4096), (1024, 2048)):
        weights = [fp8(rows, columns) for _ in range(8)]
        dense = unpack(weights[0], torch.float32)
        for tokens in (1, 2, 16, 32, 64, 128, 256, 1024, 8192):
            if tokens > 256 and rows != 12288:
                continue
            x = torch.randn(tokens, columns, device="cuda", dtype=BF16)
            providers = ["triton_skinny"] if tokens == 1 else ["triton_block_fp8"]
            providers += ["torch_block_fp8"] if tokens >= 256 else []
            for provider in providers:
                run = run_of("linear", provider)
                there, must = published.get((rows, tokens), ("", ""))
                yield Row(
                    f"linear fp8 {rows}x{columns} T={tokens} {provider}",
                    [lambda run=run, x=x, w=w: run(x, w) for w in weights],
                    lambda x=x, dense=dense: x.float() @ dense.t(),
                    rows * columns + tokens * (columns + rows) * 2,
                    2.0 * tokens * rows * columns,
                    1e-2 if tokens == 1 else 4e-2,
                    there,
                    must,
                )
    for rows, tokens, own in (
        (248320, 1, "triton_skinny"),
        (64, 1, "triton_skinny"),
        *((64, t, "torch") for t in (8, 32, 128)),
    ):
        plain = [torch.randn(rows, 2048, device="cuda", dtype=BF16) for _ in range(8 if rows < 1000 else 1)]
        x = torch.randn(tokens, 2048, device="cuda", dtype=BF16)
        for provider in dict.fromkeys((own, "torch")):
            run = run_of("linear", provider)
            yield Row(
                f"linear bf16 {rows}x2048 T={tokens} {provider}",
                [lambda run=run, x=x, w=w: run(x, w) for w in plain],
                lambda x=x, w=plain[0]: x.float() @ w.float().t(),
                plain[0].nbytes + x.nbytes,
            )


def experts() -> Iterator[Row]:
    """256 experts, top 8, hidden 2048, intermediate 512, uniform routing."""
    gate_up, down = fp8(256, 1024, 2048), fp8(256, 2048, 512)
    published = {1: ("24", "14"), 8: ("75", "62"), 128: ("209", "230"), 8192: ("955", "750")}
    for tokens in (1, 2, 4, 8, 16, 32, 128, 512, 1024, 8192):
        x = torch.randn(tokens, 2048, device="cuda", dtype=BF16)
        routings = [
            (
                torch.rand(tokens, 8, device="cuda").softmax(-1).to(BF16),
                torch.rand(tokens, 256, device="cuda").topk(8)[1].int(),
            )
            for _ in range(8 if tokens < 1000 else 1)
        ]
        touched = statistics.mean(len(chosen.unique()) for _, chosen in routings)
        for provider in (
            ("triton_few", "triton_grouped") if tokens == 8 else ("triton_few" if tokens < 8 else "triton_grouped",)
        ):
            run = run_of("experts", provider)
            there, must = published.get(tokens, ("", ""))
            yield Row(
                f"experts T={tokens} {provider}",
                [lambda run=run, x=x, w=w, c=c: run(x, w, c, gate_up, down) for w, c in routings],
                lambda x=x, r=routings: REGISTRY["experts"].reference(x.float(), *r[0], gate_up, down),
                touched * 3 * 2**20 + tokens * 8192,
                tokens * 8 * 6.0 * 2048 * 512,
                1e-2 if provider == "triton_few" else 8e-2,
                there,
                must,
            )
    shared = fp8(1024, 2048), fp8(2048, 512)
    router, gate = torch.randn(256, 2048, device="cuda", dtype=BF16), torch.randn(1, 2048, device="cuda", dtype=BF16)
    for tokens in (1, 2, 3, 8, 32, 128, 256, 1024, 8192):
        xs = [torch.randn(tokens, 2048, device="cuda", dtype=BF16) for _ in range(8 if tokens < 1000 else 1)]
        options = {"live": torch.tensor([tokens], device="cuda"), "top_k": 8, "renormalise": True}
        provider = "triton_few" if tokens < 3 else "triton_grouped"
        run = run_of("moe", provider)
        yield Row(
            f"moe T={tokens} {provider} (router, choice, experts, shared expert)",
            [lambda run=run, x=x, o=options: run(x, router, gate_up, down, *shared, gate, **o) for x in xs],
            None,  # near ties of the router; the tests compare
            256 * (1 - (1 - 8 / 256) ** tokens) * 3 * 2**20 + 2**22 + tokens * 8192,
            tokens * 9 * 6.0 * 2048 * 512,
            published={1: "51", 8: "100", 32: "160-268", 128: "243-281", 256: "270-296"}.get(tokens, ""),
        )


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The first result of an op."""
    return result if isinstance(result, Tensor) else result[0]


def small() -> Iterator[Row]:
    for tokens in (1, 128, 8192):
        x, y = (torch.randn(tokens, 2048, device="cuda", dtype=BF16) for _ in range(2))
        logits = torch.randn(tokens, 256, device="cuda", dtype=BF16)
        heads, gates = (torch.randn(tokens, 32, 128, device="cuda", dtype=BF16) for _ in range(2))
        weight, head_weight = torch.randn(2048, device="cuda", dtype=BF16), torch.randn(128, device="cuda")
        for op, arguments, options, nbytes in (
            ("route", (logits,), {"top_k": 8, "renormalise": True}, tokens * 560),
            ("rms_norm", (x, weight), {"eps": 1e-6, "zero_centred": True}, tokens * 8192),
            ("add_rms_norm", (x, y, weight), {"eps": 1e-6, "zero_centred": True}, tokens * 16384),
            ("gated_rms_norm", (heads, gates, head_weight), {"eps": 1e-6}, tokens * 4096 * 6),
            ("silu_mul", (x,), {}, tokens * 6144),
        ):
            run = REGISTRY[op].providers["triton_fused"].run
            yield Row(
                f"{op} T={tokens}",
                [lambda run=run, a=arguments, o=options: first(run(*a, **o))],
                lambda op=op, a=arguments, o=options: first(REGISTRY[op].reference(*a, **o)),
                nbytes,
                tolerance=2e-2,
            )


def samples() -> Iterator[Row]:
    for rows in (1, 128):
        logits = [torch.randn(rows, 248320, device="cuda", dtype=BF16) for _ in range(8 if rows == 1 else 2)]
        warm, number = torch.full((rows,), 0.7, device="cuda"), torch.arange(rows, device="cuda")
        for greedy in (True, False):
            run = run_of("sample", "triton_split")
            rest = (warm, warm, warm, number, number)
            yield Row(
                f"sample {rows} x 248320 {'greedy' if greedy else 'drawn'}",
                [lambda run=run, z=z, g=greedy, a=rest: run(z, *a, greedy=g, filtered=False) for z in logits],
                lambda z=logits, g=greedy, rest=rest: REGISTRY["sample"].reference(
                    z[0], *rest, greedy=g, filtered=False
                ),
                logits[0].nbytes,
                tolerance=1e-9,
            )
        settings = [torch.full((rows,), value, device="cuda") for value in (0.7, 20, 0.95)]
        run = run_of("sample", "triton_split")
        yield Row(
            f"sample {rows} x 248320 top-k 20, top-p .95",
            [lambda run=run, z=z, s=settings, n=number: run(z, *s, n, n) for z in logits],
            lambda z=logits, s=settings, n=number: REGISTRY["sample"].reference(z[0], *s, n, n),
            logits[0].nbytes,
            tolerance=1e-9,
        )
        yield Row(f"torch argmax {rows} x 248320", [lambda z=z: z.argmax(-1) for z in logits], None, logits[0].nbytes)


def error(actual: Tensor, expected: Tensor) -> float:
    """The worst row's RMS error over the RMS of the answer."""
    actual, expected = (t.double().reshape(-1, t.shape[-1]) for t in (actual, expected))
    return float((actual - expected).square().mean(-1).sqrt().max() / expected.square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    only = parser.parse_args().only
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {bandwidth / 1e12:.2f} TB/s")
    print(
        f"{'':64s} {'us':>8s} {'floor':>8s} {'of it':>6s} {'TB/s':>5s} {'TF':>5s} {'error':>8s} {'elsewhere':>9s} {'must':>5s}"
    )
    for group in (linears, experts, small, samples):
        for row in group():
            if only not in row.name:
                continue
            found = error(row.calls[0](), row.expected()) if row.expected else 0.0
            time = microseconds(row.calls)
            floor = max(row.nbytes / bandwidth, row.operations / PEAK) * 1e6
            print(
                f"{row.name:64s} {time:8.2f} {floor:8.2f} {floor / time:6.0%} {row.nbytes / time / 1e6:5.2f}"
                f" {row.operations / time / 1e6:5.0f} {found:8.1e} {row.published:>9s} {row.must:>5s}"
                + ("" if found <= row.tolerance else f"   WRONG: more than {row.tolerance:.0e}"),
                flush=True,
            )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
