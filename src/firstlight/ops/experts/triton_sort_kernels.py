"""Sorting pairs (token, choice) by expert on the device, and cutting the sorted rows into tiles of one expert each.

Pair token * k + choice gets a row, and an expert's rows follow each other in any order: a row's products don't depend on
where in a tile it stands, so neither does any result. Two launches for few pairs, four for many; all depend on shapes alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
"""Pairs that a program looks at together."""
MOST_CHUNKS_ALONE = 2
"""Up to so many chunks one program counts them all."""


@triton.jit
def expert_of(experts_ptr, o_pair, pairs, first_expert, E: tl.constexpr):
    """Local expert numbers of pairs; E where no local expert serves one, or there is none."""
    b_expert = tl.load(experts_ptr + o_pair, mask=o_pair < pairs, other=-1).to(tl.int32) - first_expert
    return tl.where((o_pair < pairs) & (b_expert >= 0) & (b_expert < E), b_expert, E)


@triton.jit
def count_pairs(
    experts_ptr, counts_ptr, pairs, first_expert, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """counts [BINS] += pairs of each expert; those that nobody here serves are in bin E."""
    b_expert = expert_of(experts_ptr, tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), pairs, first_expert, E)
    tl.atomic_add(counts_ptr + tl.arange(0, BINS), tl.histogram(b_expert, BINS), sem="relaxed")


@triton.jit
def plan_tiles(
    experts_ptr, counts_ptr, tile_ptr, tiles_ptr, pairs, first_expert,
    E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One program: counts [BINS] becomes the first row of each expert.

    tile [bound, 3]: (expert, first row, row after the last) of each tile of BLOCK_M rows. tiles [1]: how many there are.
    """
    o_bin = tl.arange(0, BINS)
    if COUNTED:
        b_rows = tl.load(counts_ptr + o_bin)
    else:
        b_rows = tl.zeros([BINS], dtype=tl.int32)
        for i_pair in range(0, pairs, CHUNK):
            b_rows += tl.histogram(expert_of(experts_ptr, i_pair + tl.arange(0, CHUNK), pairs, first_expert, E), BINS)
    b_rows = tl.where(o_bin < E, b_rows, 0)
    b_first = tl.cumsum(b_rows, axis=0) - b_rows
    tl.store(counts_ptr + o_bin, b_first)
    b_tiles = (b_rows + BLOCK_M - 1) // BLOCK_M
    b_first_tile = tl.cumsum(b_tiles, axis=0) - b_tiles
    tl.store(tiles_ptr, tl.sum(b_tiles, axis=0))
    for i in range(tl.max(b_tiles, axis=0)):
        p_tile = tile_ptr + (b_first_tile + i) * 3
        tl.store(p_tile, o_bin, mask=i < b_tiles)
        tl.store(p_tile + 1, b_first + i * BLOCK_M, mask=i < b_tiles)
        tl.store(p_tile + 2, b_first + b_rows, mask=i < b_tiles)


@triton.jit
def place_pairs(experts_ptr, next_ptr, order_ptr, pairs, first_expert, E: tl.constexpr, PART: tl.constexpr):
    """order [pairs]: the pair of each row. Each pair takes its expert's next row."""
    o_pair = tl.program_id(0) * PART + tl.arange(0, PART)
    b_expert = expert_of(experts_ptr, o_pair, pairs, first_expert, E)
    b_row = tl.atomic_add(next_ptr + b_expert, 1, mask=b_expert < E, sem="relaxed")
    tl.store(order_ptr + b_row, o_pair, mask=b_expert < E)


def sorted_pairs(
    chosen: Tensor, first_expert: int, local_experts: int, block_m: int, bound: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(order, tile, tiles) of chosen [T, k], as `plan_tiles` and `place_pairs` say; `bound` tiles at most."""
    pairs, device = chosen.numel(), chosen.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    tile = torch.empty((bound, 3), dtype=torch.int32, device=device)
    tiles = torch.empty(1, dtype=torch.int32, device=device)
    chunks = triton.cdiv(pairs, CHUNK)
    bins = triton.next_power_of_2(local_experts + 1)
    counted = chunks > MOST_CHUNKS_ALONE
    counts = (torch.zeros if counted else torch.empty)(bins, dtype=torch.int32, device=device)
    common: dict[str, Any] = {"E": local_experts, "BINS": bins, "CHUNK": CHUNK}
    if counted:
        count_pairs[(chunks,)](chosen, counts, pairs, first_expert, **common)
    plan_tiles[(1,)](chosen, counts, tile, tiles, pairs, first_expert, BLOCK_M=block_m, COUNTED=counted, **common)
    part = 128
    place_pairs[(triton.cdiv(pairs, part),)](chosen, counts, order, pairs, first_expert, E=local_experts, PART=part)
    return order, tile, tiles
