"""experts, moe and the sort under the interpreter. Its cast to FP8 rounds some numbers to half their value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from product_checks import check_experts, check_moe, draw, routed

from firstlight.ops.experts import triton_few, triton_grouped
from firstlight.ops.moe import triton_few as triton_few_moe
from firstlight.ops.moe import triton_grouped as triton_grouped_moe
from firstlight.quant import WHOLE_ROW, Format, Packed
from firstlight.quant.blocks import scale_shape

F16, FP8 = torch.float16, torch.float8_e4m3fn
INTERPRETED_FP8 = 0.4
BLOCK, ROW = (128, 128), (1, WHOLE_ROW)
Block = tuple[int, int] | None


@pytest.mark.parametrize(
    ("block", "tokens", "hidden", "size"),
    [(None, 3, 40, 24), (BLOCK, 2, 160, 128), (ROW, 1, 41, 27), (ROW, 3, 41, 27), (ROW, 8, 40, 24)],
)
def test_few(block: Block, tokens: int, hidden: int, size: int) -> None:
    check_experts(
        triton_few.run, "cpu", F16, tokens, 4, 3, hidden, size, 3e-3, block=block, first_expert=1, padding=tokens // 2
    )


def test_grouped_plain() -> None:
    check_experts(triton_grouped.run, "cpu", F16, 21, 4, 2, 72, 40, 3e-3, block=None, first_expert=1)


@pytest.mark.parametrize("tokens", [1, 9, 60])
@pytest.mark.parametrize("block", [BLOCK, ROW])
def test_grouped_fp8(block: Block, tokens: int) -> None:
    """Thin tiles, and wide ones from 24 pairs an expert on."""
    check_experts(
        triton_grouped.run, "cpu", F16, tokens, 3, 3, 256, 128, INTERPRETED_FP8, block=block, first_expert=1,
        padding=tokens // 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("block", "tokens", "hidden", "size", "shared"),
    [(None, 3, 40, 24, 32), (BLOCK, 2, 128, 128, 128), (ROW, 3, 41, 27, 35)],
)
def test_moe(block: Block, tokens: int, hidden: int, size: int, shared: int) -> None:
    check_moe(triton_few_moe.run, "cpu", F16, tokens, 4, 2, hidden, size, shared, 5e-3, block=block)


@pytest.mark.parametrize(("tokens", "gated"), [(5, True), (60, False)])
@pytest.mark.parametrize("block", [BLOCK, ROW])
def test_grouped_moe(block: Block, tokens: int, gated: bool) -> None:
    """Lists alone for few tokens, tiles for many."""
    check_moe(
        triton_grouped_moe.run, "cpu", F16, tokens, 4, 2, 256, 128, 256, INTERPRETED_FP8, block=block, gated=gated
    )


def of_both_kinds(*shape: int) -> tuple[Packed, Packed]:
    """The same values with a scale a block, all equal, and with one a row, which differ: powers of two all of them.

    Elements are whole numbers up to 8, divided by up to 8 or times as many, which FP8 holds.
    """
    whole = draw(*shape, dtype=torch.float32, device="cpu", scale=4).round().clamp(-8, 8)
    unit = 2.0 ** -round(math.log2(4 * shape[-1] ** 0.5))
    row = 2.0 ** draw(*shape[:-1], 1, dtype=torch.float32, device="cpu", scale=2).round().clamp(-3, 3)
    parts = ((BLOCK, whole, torch.full(scale_shape(shape, BLOCK), unit)), (ROW, whole / row, row * unit))
    block, by_row = (
        Packed({"data": data.to(FP8), "scale": scale.bfloat16()}, Format("float8_e4m3fn", form, "bfloat16"), shape)
        for form, data, scale in parts
    )
    return block, by_row


@pytest.mark.parametrize(
    ("run", "tokens", "hidden"),
    [(triton_few_moe.run, 2, 128), (triton_grouped_moe.run, 5, 256), (triton_grouped_moe.run, 30, 256)],
    ids=["few", "thin", "wide"],
)
def test_a_scale_a_row_rounds_nothing_that_one_a_block_does_not(run: Any, tokens: int, hidden: int) -> None:
    """With powers of two, which round nothing, results are equal bit for bit, whatever the cast to FP8 makes of activations."""
    experts, size, shared = 2, 128, hidden
    x, router, gate = (draw(n, hidden, dtype=F16, device="cpu") for n in (tokens, experts, 1))
    shapes = [(experts, 2 * size, hidden), (experts, hidden, size), (2 * shared, hidden), (hidden, shared)]
    blocks, rows = zip(*(of_both_kinds(*shape) for shape in shapes), strict=True)
    first, second = (
        run(x, router, *weights, gate / 16, live=None, top_k=2, renormalise=True) for weights in (blocks, rows)
    )
    assert first.abs().max() > 0.1
    assert torch.equal(first, second)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "shared"), [(40, 3, 9, False), (700, 2, 9, True)])
def test_every_pair_is_in_a_tile_of_its_expert(tokens: int, top_k: int, experts: int, shared: bool) -> None:
    from firstlight.ops.experts.triton_list_kernels import listed, tiled

    _, chosen = routed(tokens, experts, top_k, "cpu", padding=tokens // 10)
    local = experts - 2
    lists = listed(chosen, 1, local)
    tile, tiles = tiled(lists, 16, tokens * top_k // 16 + local + 1 + tokens, shared)
    number = chosen.flatten().long() - 1
    covered: list[int] = []
    rows_of_shared = 0
    for expert, first, end in tile[: int(tiles)].tolist():
        assert 0 < end - first <= 16
        if expert == local:
            rows_of_shared += end - first
            continue
        pairs = lists.entries[expert, first:end].long()
        assert (number[pairs] == expert).all()
        covered += pairs.tolist()
    served = ((number >= 0) & (number < local)).nonzero()[:, 0]
    assert sorted(covered) == served.tolist()
    assert rows_of_shared == shared * tokens
