"""Triton's products, routing, norms and sampling on a GPU, against the references in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from product_checks import (
    check_copies,
    check_experts,
    check_filtered_sample,
    check_linear,
    check_moe,
    check_route,
    check_rows,
    check_sample,
    check_what_is_not_finite,
    draw,
    fp8,
    routed,
)  # fmt: skip

from firstlight.hardware.detect import detect
from firstlight.ops.experts import triton_few, triton_grouped
from firstlight.ops.linear import torch_block_fp8, torch_row_fp8, triton_block_fp8, triton_row_fp8, triton_skinny
from firstlight.ops.moe import triton_few as triton_few_moe
from firstlight.ops.moe import triton_grouped as triton_grouped_moe
from firstlight.ops.op import REGISTRY, Call
from firstlight.ops.route import triton_fused
from firstlight.ops.sample import triton_split
from firstlight.quant import WHOLE_ROW

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BF16 = torch.bfloat16
ROUNDED = 6e-3
"""bfloat16's roundings, over the RMS of the answer."""
QUANTISED = 4e-2
"""Activations in FP8, one scale a token and 128 columns."""
QUANTISED_TWICE = 8e-2
BLOCK, ROW = (128, 128), (1, WHOLE_ROW)
Block = tuple[int, int] | None


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "columns"), [(1, 2048), (130, 200), (2048, 4096), (4100, 2048)])
def test_skinny(tokens: int, rows: int, columns: int) -> None:
    check_linear(triton_skinny.run, "cuda", BF16, tokens, rows, columns, ROUNDED, bias=True)
    check_linear(triton_skinny.run, "cuda", BF16, tokens, rows, columns, ROUNDED, block=None)
    check_linear(triton_skinny.run, "cuda", BF16, tokens, rows, columns, ROUNDED, block=(64, 32), result=torch.float32)


@pytest.mark.parametrize("tokens", [2, 16, 31, 65, 300])
@pytest.mark.parametrize(("rows", "columns"), [(130, 256), (2048, 4096), (1000, 640)])
def test_block_fp8(tokens: int, rows: int, columns: int) -> None:
    check_linear(triton_block_fp8.run, "cuda", BF16, tokens, rows, columns, QUANTISED, bias=True)


@pytest.mark.parametrize("tokens", [256, 272, 1040])
def test_torch_block_fp8(tokens: int) -> None:
    check_linear(torch_block_fp8.run, "cuda", BF16, tokens, 384, 1024, QUANTISED)


@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 257, 1030])
@pytest.mark.parametrize(("rows", "columns"), [(130, 256), (2048, 4096), (12288, 2048)])
def test_fp8_by_row(tokens: int, rows: int, columns: int) -> None:
    options = {"block": ROW, "bias": True}
    if tokens <= triton_skinny.MOST_TOKENS:
        check_linear(triton_skinny.run, "cuda", BF16, tokens, rows, columns, 2e-2, **options)
    if tokens > 1:
        check_linear(triton_row_fp8.run, "cuda", BF16, tokens, rows, columns, QUANTISED, **options)
    if tokens >= torch_block_fp8.LEAST_TOKENS and rows % torch_row_fp8.MULTIPLE == 0:
        check_linear(torch_row_fp8.run, "cuda", BF16, tokens, rows, columns, QUANTISED, block=ROW)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("block", [None, BLOCK, ROW])
def test_few_experts(tokens: int, block: Block) -> None:
    check_experts(triton_few.run, "cuda", BF16, tokens + 1, 24, 5, 640, 384, 2 * ROUNDED, block=block, first_expert=1)


@pytest.mark.parametrize("tokens", [3, 40, 150, 700])
@pytest.mark.parametrize("block", [None, BLOCK, ROW])
def test_grouped_experts(tokens: int, block: Block) -> None:
    tolerance = QUANTISED_TWICE if block else 2 * ROUNDED
    check_experts(triton_grouped.run, "cuda", BF16, tokens, 24, 5, 640, 384, tolerance, block=block, first_expert=1)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("block", [None, BLOCK, ROW])
def test_mixture(tokens: int, block: Block) -> None:
    check_moe(
        triton_few_moe.run, "cuda", torch.float32, tokens, 24, 5, 640, 384, 256, 1e-4, block=block, gated=tokens != 3
    )


@pytest.mark.parametrize("tokens", [3, 16, 40, 256, 700])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("block", [BLOCK, ROW])
def test_grouped_mixture(block: Block, tokens: int, gated: bool) -> None:
    """Lists alone, then tiles; 700 tokens with torch's router. In float16, whose router has no near ties."""
    check_moe(
        triton_grouped_moe.run,
        "cuda",
        torch.float16,
        tokens,
        24,
        5,
        640,
        384,
        256,
        QUANTISED_TWICE,
        block=block,
        gated=gated,
    )


@pytest.mark.parametrize("tokens", [3, 40, 300])
@pytest.mark.parametrize("block", [BLOCK, ROW])
def test_what_is_not_finite(tokens: int, block: tuple[int, int]) -> None:
    x = draw(tokens, 1024, dtype=BF16, device="cuda")
    weight = fp8(draw(384, 1024, dtype=BF16, device="cuda") / 32, block)
    for run in willing("linear", x, weight):
        check_what_is_not_finite(lambda x, run=run: run(x, weight), x)


@pytest.mark.parametrize("tokens", [3, 40, 700])
@pytest.mark.parametrize("block", [BLOCK, ROW])
def test_what_is_not_finite_in_experts(block: tuple[int, int], tokens: int) -> None:
    x = draw(tokens, 640, dtype=BF16, device="cuda")
    gate_up, down = (fp8(draw(24, *shape, dtype=BF16, device="cuda") / 25, block) for shape in ((768, 640), (640, 384)))
    weights, chosen = routed(tokens, 24, 5, "cuda")
    for run in willing("experts", x, weights, chosen, gate_up, down):
        check_what_is_not_finite(lambda x, run=run: run(x, weights, chosen, gate_up, down), x)


def willing(op: str, *args: Any) -> list[Any]:
    """The providers of an op, without the reference, that take this call."""
    call = Call(args, {}, None, detect("cuda"))
    return [one.run for one in REGISTRY[op].providers.values() if one.when(call) is None]


@pytest.mark.parametrize("options", [{}, {"scoring": "sigmoid", "biased": True, "scale": 2.5}])
@pytest.mark.parametrize(("experts", "top_k"), [(256, 8), (512, 10), (60, 4)])
def test_route(experts: int, top_k: int, options: dict[str, Any]) -> None:
    check_route(triton_fused.run, "cuda", 37, experts, top_k, renormalise=not options, **options)


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (BF16, 2e-2)])
@pytest.mark.parametrize("columns", [72, 128, 2048, 5120])
def test_rows(dtype: torch.dtype, tolerance: float, zero_centred: bool, columns: int) -> None:
    check_rows("cuda", dtype, 33, 4, columns, tolerance, zero_centred)


def test_copies() -> None:
    check_copies("cuda", 100, 2048)


@pytest.mark.parametrize("greedy", [True, False])
def test_sample(greedy: bool) -> None:
    check_sample(triton_split.run, "cuda", 5, 248_320, greedy)


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "spread"), [(248_320, BF16, 3.0), (248_320, torch.float32, 0.5), (5003, BF16, 0.2)]
)
def test_filtered_sample(vocabulary: int, dtype: torch.dtype, spread: float) -> None:
    check_filtered_sample(triton_split.run, "cuda", vocabulary, dtype, spread)


def test_rows_beyond_two_to_the_31() -> None:
    """The last of more elements than an int32 counts."""
    x = torch.zeros(2**20 + 1, 2048, dtype=BF16, device="cuda")
    x[-1] = draw(2048, dtype=BF16, device="cuda")
    gate = torch.zeros(len(x), 1, dtype=BF16, device="cuda")
    from firstlight.ops.sigmoid_mul.triton_fused import run

    assert torch.equal(run(x, gate)[-1], x[-1] * 0.5)
    weight = fp8(draw(256, 2048, dtype=BF16, device="cuda"))
    actual = triton_block_fp8.run(x, weight)[-1:]
    assert torch.equal(actual, triton_block_fp8.run(x[-65:], weight)[-1:])


def captured(run: Any) -> tuple[Any, torch.cuda.CUDAGraph]:
    """(what the calls gave while they were captured, the graph), after a call that compiles."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph


@pytest.mark.parametrize("tokens", [40, 700])
def test_no_launch_depends_on_data(tokens: int) -> None:
    """Captured once, replayed on other routing: the same answers as a fresh call, bit for bit."""
    x = draw(tokens, 640, dtype=BF16, device="cuda")
    weights = torch.rand(tokens, 5, device="cuda").bfloat16()
    chosen = torch.rand(tokens, 24, device="cuda").topk(5).indices.int()
    gate_up, down = (fp8(draw(24, *shape, dtype=BF16, device="cuda") / 25) for shape in ((768, 640), (640, 384)))
    result, graph = captured(lambda: triton_grouped.run(x, weights, chosen, gate_up, down))
    chosen[:] = 7
    chosen[20:] = -1
    graph.replay()
    assert torch.equal(result, triton_grouped.run(x, weights, chosen, gate_up, down))


@pytest.mark.parametrize("tokens", [1, 2, 8, 40, 300])
def test_kernels_that_start_early_wait_for_their_inputs(tokens: int) -> None:
    """A chain of every kernel that starts while the one before it ends, captured and replayed many times on new inputs.

    The last link writes what the first one reads, so that a kernel that doesn't wait would show.
    """
    hidden, experts, top_k = 640, 24, 5
    x = draw(tokens, hidden, dtype=BF16, device="cuda")
    norm_weight = draw(hidden, dtype=BF16, device="cuda") / 10
    wide, back = (
        fp8(draw(2 * hidden, hidden, dtype=BF16, device="cuda") / 25),
        fp8(draw(hidden, hidden, dtype=BF16, device="cuda") / 25),
    )
    shapes = [(experts, 768, hidden), (experts, hidden, 384), (512, hidden), (hidden, 256)]
    mixture = [fp8(draw(*shape, dtype=BF16, device="cuda") / 20) for shape in shapes]
    router, gate = draw(experts, hidden, dtype=BF16, device="cuda"), draw(1, hidden, dtype=BF16, device="cuda") / 25
    live = torch.tensor([max(tokens - 1, 1)], device="cuda", dtype=torch.int32)
    providers = {name: op.providers for name, op in REGISTRY.items()}
    linear = "triton_skinny" if tokens == 1 else "triton_block_fp8"
    few = "triton_few" if tokens < 3 else "triton_grouped"

    def chain() -> Any:
        y, residual = x, x
        for _ in range(3):
            y, residual = providers["add_rms_norm"]["triton_fused"].run(
                y, residual, norm_weight, eps=1e-6, zero_centred=True
            )
            y = providers["silu_mul"]["triton_fused"].run(providers["linear"][linear].run(y, wide))
            y = providers["linear"][linear].run(y, back)
            y = providers["moe"][few].run(y, router, *mixture, gate, live=live, top_k=top_k, renormalise=True)
        x.copy_(providers["rms_norm"]["triton_fused"].run(y + residual, norm_weight, eps=1e-6, zero_centred=True))
        return x

    first = x.clone()
    _, graph = captured(chain)
    for _ in range(20):
        x.copy_(first)
        chain()
        torch.cuda.synchronize()
        expected = x.clone()
        x.copy_(first)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, expected)
        first = expected.roll(1, 0) + 0.1
