"""experts, moe and the sort under the interpreter. Its cast to FP8 rounds some numbers to half their value."""

from __future__ import annotations

import pytest
import torch
from product_checks import check_experts, check_moe, routed

from firstlight.ops.experts import triton_few, triton_grouped
from firstlight.ops.moe import triton_few as triton_few_moe
from firstlight.ops.moe import triton_grouped as triton_grouped_moe

F16 = torch.float16
INTERPRETED_FP8 = 0.4


def test_few_plain() -> None:
    check_experts(triton_few.run, "cpu", F16, 3, 4, 2, 40, 24, 3e-3, packed=False, first_expert=1)


def test_few_fp8() -> None:
    check_experts(triton_few.run, "cpu", F16, 2, 3, 2, 160, 128, 3e-3, packed=True, first_expert=1)


def test_grouped_plain() -> None:
    check_experts(triton_grouped.run, "cpu", F16, 21, 4, 2, 72, 40, 3e-3, packed=False, first_expert=1)


@pytest.mark.parametrize("tokens", [9, 60])
def test_grouped_fp8(tokens: int) -> None:
    """Thin tiles, and wide ones from 24 pairs an expert on."""
    check_experts(triton_grouped.run, "cpu", F16, tokens, 3, 2, 256, 128, INTERPRETED_FP8, packed=True, first_expert=1)


@pytest.mark.parametrize(
    ("packed", "tokens", "hidden", "size", "shared"), [(False, 3, 40, 24, 32), (True, 2, 128, 128, 128)]
)
def test_moe(packed: bool, tokens: int, hidden: int, size: int, shared: int) -> None:
    check_moe(triton_few_moe.run, "cpu", F16, tokens, 4, 2, hidden, size, shared, 5e-3, packed=packed)


@pytest.mark.parametrize(("tokens", "gated"), [(5, True), (60, False)])
def test_grouped_moe(tokens: int, gated: bool) -> None:
    """Lists alone for few tokens, tiles for many."""
    check_moe(
        triton_grouped_moe.run, "cpu", F16, tokens, 4, 2, 256, 128, 256, INTERPRETED_FP8, packed=True, gated=gated
    )


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
