"""Sorting pairs (token, choice) by expert on the device, and cutting the sorted rows into tiles of one expert each.

Pair token * k + choice gets a row; the rows of an expert follow each other in the order of their pairs. Three launches that
depend on shapes alone: count by chunks, add up, place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, PART = 512, 128
"""Pairs that are counted together, and those that a program places."""


@triton.jit
def expert_of(experts_ptr, o_pair, pairs, first_expert, E: tl.constexpr):
    """Local expert numbers of pairs; E where no local expert serves one, or there is none."""
    b_expert = tl.load(experts_ptr + o_pair, mask=o_pair < pairs, other=-1).to(tl.int32) - first_expert
    return tl.where((o_pair < pairs) & (b_expert >= 0) & (b_expert < E), b_expert, E)


@triton.jit
def count_pairs(
    experts_ptr, counts_ptr, pairs, first_expert, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """counts [chunks, BINS]: pairs of each expert in each chunk; those that nobody here serves are in bin E."""
    i_chunk = tl.program_id(0)
    b_expert = expert_of(experts_ptr, i_chunk * CHUNK + tl.arange(0, CHUNK), pairs, first_expert, E)
    tl.store(counts_ptr + i_chunk * BINS + tl.arange(0, BINS), tl.histogram(b_expert, BINS))


@triton.jit
def plan_tiles(
    experts_ptr, counts_ptr, tile_ptr, tiles_ptr, pairs, chunks, first_expert,
    E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, ONE_CHUNK: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """One program. counts becomes the row at which each chunk's pairs of each expert begin; SOME chunks are added up at once.

    tile [bound, 3]: (expert, first row, row after the last) of each tile of BLOCK_M rows. tiles [1]: how many there are.
    """
    o_bin, o_some = tl.arange(0, BINS), tl.arange(0, SOME)
    if ONE_CHUNK:
        b_expert = expert_of(experts_ptr, tl.arange(0, CHUNK), pairs, first_expert, E)
        b_rows = tl.where(o_bin < E, tl.histogram(b_expert, BINS), 0)
        b_first = tl.cumsum(b_rows, axis=0) - b_rows
        tl.store(counts_ptr + o_bin, b_first)
    else:
        b_rows = tl.zeros([BINS], dtype=tl.int32)
        for i_chunk in range(0, chunks, SOME):
            m_counts = (i_chunk + o_some < chunks)[:, None] & (o_bin < E)[None, :]
            p_counts = counts_ptr + (i_chunk + o_some)[:, None] * BINS + o_bin[None, :]
            b_rows += tl.sum(tl.load(p_counts, mask=m_counts, other=0), axis=0)
        b_first = tl.cumsum(b_rows, axis=0) - b_rows
        b_next = b_first
        for i_chunk in range(0, chunks, SOME):
            m_counts = (i_chunk + o_some < chunks)[:, None] & (o_bin < E)[None, :]
            p_counts = counts_ptr + (i_chunk + o_some)[:, None] * BINS + o_bin[None, :]
            b_counts = tl.load(p_counts, mask=m_counts, other=0)
            tl.store(p_counts, b_next[None, :] + tl.cumsum(b_counts, axis=0) - b_counts, mask=m_counts)
            b_next += tl.sum(b_counts, axis=0)
    b_tiles = (b_rows + BLOCK_M - 1) // BLOCK_M
    b_first_tile = tl.cumsum(b_tiles, axis=0) - b_tiles
    tl.store(tiles_ptr, tl.sum(b_tiles, axis=0))
    for i in range(0, tl.max(b_tiles, axis=0)):
        p_tile = tile_ptr + (b_first_tile + i) * 3
        tl.store(p_tile, o_bin, mask=i < b_tiles)
        tl.store(p_tile + 1, b_first + i * BLOCK_M, mask=i < b_tiles)
        tl.store(p_tile + 2, b_first + b_rows, mask=i < b_tiles)


@triton.jit
def place_pairs(
    experts_ptr, start_ptr, order_ptr, pairs, first_expert,
    E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """order [pairs]: the pair of each row. A program places PART pairs, behind those of their chunk that come before."""
    o_part = tl.arange(0, PART)
    o_pair = tl.program_id(0) * PART + o_part
    i_chunk = tl.program_id(0) * PART // CHUNK
    b_expert = expert_of(experts_ptr, o_pair, pairs, first_expert, E)
    b_row = tl.load(start_ptr + i_chunk * BINS + b_expert)
    for i_pair in range(i_chunk * CHUNK, tl.program_id(0) * PART + PART, PART):
        b_other = expert_of(experts_ptr, i_pair + o_part, pairs, first_expert, E)
        m_before = (b_other[None, :] == b_expert[:, None]) & ((i_pair + o_part)[None, :] < o_pair[:, None])
        b_row += tl.sum(m_before.to(tl.int32), axis=1)
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
    counts = torch.empty((chunks, bins), dtype=torch.int32, device=device)
    common: dict[str, Any] = {"E": local_experts, "BINS": bins, "CHUNK": CHUNK}
    if chunks > 1:
        count_pairs[(chunks,)](chosen, counts, pairs, first_expert, **common)
    plan_tiles[(1,)](
        chosen, counts, tile, tiles, pairs, chunks, first_expert, BLOCK_M=block_m, ONE_CHUNK=chunks == 1,
        SOME=min(16, triton.next_power_of_2(chunks)), num_warps=8, **common,
    )  # fmt: skip
    place_pairs[(triton.cdiv(pairs, PART),)](chosen, counts, order, pairs, first_expert, PART=PART, **common)
    return order, tile, tiles
