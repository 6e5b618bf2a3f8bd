"""The experts of Hopper GPUs, against the references in float64 and against `triton_grouped`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from product_checks import check_experts, check_moe, draw, fp8, relative_error
from torch import Tensor

from firstlight.ops.experts import hopper_grouped, triton_grouped
from firstlight.ops.moe import hopper_grouped as hopper_grouped_moe

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

BF16 = torch.bfloat16
QUANTISED_TWICE = 8e-2
"""Activations in FP8, one scale a token and 128 columns, before each product."""


@pytest.mark.parametrize("tokens", [40, 700, 1030])
@pytest.mark.parametrize(("hidden", "size"), [(640, 384), (2048, 512), (512, 1280)])
def test_experts(tokens: int, hidden: int, size: int) -> None:
    """Bands of 1, 8 and 4 column tiles; the last with rows that are read again for each."""
    run = hopper_grouped.run
    check_experts(run, "cuda", BF16, tokens, 24, 5, hidden, size, QUANTISED_TWICE, first_expert=1)


@pytest.mark.parametrize("tokens", [300, 1030])
@pytest.mark.parametrize("gated", [False, True])
def test_mixture(tokens: int, gated: bool) -> None:
    """In float16, whose router has no near ties."""
    run = hopper_grouped_moe.run
    check_moe(run, "cuda", torch.float16, tokens, 24, 5, 640, 384, 384, QUANTISED_TWICE, gated=gated)


def inputs(tokens: int) -> tuple[Tensor, Tensor, Any, Any]:
    x = draw(tokens, 2048, dtype=BF16, device="cuda")
    gate_up, down = (fp8(draw(24, *shape, dtype=BF16, device="cuda") / 25) for shape in ((1024, 2048), (2048, 512)))
    return x, torch.rand(tokens, 5, device="cuda").bfloat16(), gate_up, down


def test_odd_numbers_of_rows() -> None:
    """Experts with 0, 1, 63, 64, 65, 127, 128, 129 and all tokens' rows, twice: the same answer, bit for bit."""
    x, weights, gate_up, down = inputs(1030)
    chosen = torch.full((1030, 5), -1, dtype=torch.int32, device="cuda")
    chosen[:, 0] = 23
    for i, count in enumerate((0, 1, 63, 64, 65, 127, 128, 129)):
        chosen[i * 7 : i * 7 + count, 1 + i % 4] = i + 2
    first = hopper_grouped.run(x, weights, chosen, gate_up, down)
    assert torch.equal(first, hopper_grouped.run(x, weights, chosen, gate_up, down))
    expected = triton_grouped.run(x, weights, chosen, gate_up, down)
    assert relative_error(first, expected.cpu().double()) < 2e-2  # what quantising the intermediate rounds otherwise


def test_no_launch_depends_on_data() -> None:
    """Captured once, replayed on other routing: the same answers as a fresh call, bit for bit."""
    x, weights, gate_up, down = inputs(700)
    chosen = torch.rand(700, 24, device="cuda").topk(5).indices.int()
    hopper_grouped.run(x, weights, chosen, gate_up, down)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = hopper_grouped.run(x, weights, chosen, gate_up, down)
    chosen[:] = 7
    chosen[20:] = -1
    graph.replay()
    assert torch.equal(result, hopper_grouped.run(x, weights, chosen, gate_up, down))
