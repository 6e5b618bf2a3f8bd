"""Which pairs (token, choice) go to which expert, found on the device: a list for each expert, cut into tiles.

A token's choices are numbered token * slots + choice: that is a *pair*. Each expert has a list of its pairs, in any order: a
row's products don't depend on where in a tile it stands, so neither does any result. The shared expert's list is every
token's last slot, so it is written nowhere. All launches depend on shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two

COUNT_STRIDE = tl.constexpr(32)
"""Counters stand in cache lines of their own, or the units that add to them would wait for each other."""


@triton.jit
def append_pairs(count_ptr, list_ptr, b_expert, o_pair, m_local, tokens):
    """Put each pair where its expert's list ends. b_expert: local numbers, legal where m_local."""
    b_rank = tl.atomic_add(count_ptr + b_expert * COUNT_STRIDE, 1, mask=m_local, sem="relaxed")
    tl.store(list_ptr + b_expert.to(tl.int64) * tokens + b_rank, o_pair, mask=m_local)


@kernel
def list_pairs(
    experts_ptr, count_ptr, list_ptr, tokens, first_expert, local_experts,
    TOP_K: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The lists of experts [T, TOP_K], where no slot is a shared expert's."""
    wait_for_inputs(PDL)
    o_pair = tl.program_id(0) * PART + tl.arange(0, PART)
    b_expert = tl.load(experts_ptr + o_pair, mask=o_pair < tokens * TOP_K, other=-1).to(tl.int32) - first_expert
    m_local = (o_pair < tokens * TOP_K) & (b_expert >= 0) & (b_expert < local_experts)
    append_pairs(count_ptr, list_ptr, b_expert, o_pair, m_local, tokens)


@kernel
def plan_tiles(
    count_ptr, tile_ptr, tiles_ptr, tokens, local_experts,
    BINS: tl.constexpr, BLOCK_M: tl.constexpr, HAS_SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """tile [bound, 3]: (expert, first entry, entry after the last) of each tile of up to BLOCK_M entries. tiles [1]: how many.

    The shared expert has number `local_experts`.
    """
    wait_for_inputs(PDL)
    o_bin = tl.arange(0, BINS)
    b_rows = tl.load(count_ptr + o_bin * COUNT_STRIDE, mask=o_bin < local_experts, other=0)
    if HAS_SHARED:
        b_rows = tl.where(o_bin == local_experts, tokens, b_rows)
    b_tiles = (b_rows + BLOCK_M - 1) // BLOCK_M
    b_first_tile = tl.cumsum(b_tiles, axis=0) - b_tiles
    tl.store(tiles_ptr, tl.sum(b_tiles, axis=0))
    for i in range(tl.max(b_tiles, axis=0)):
        p_tile = tile_ptr + (b_first_tile + i) * 3
        tl.store(p_tile, o_bin, mask=i < b_tiles)
        tl.store(p_tile + 1, o_bin * 0 + i * BLOCK_M, mask=i < b_tiles)
        tl.store(p_tile + 2, tl.minimum(b_rows, (i + 1) * BLOCK_M), mask=i < b_tiles)


@triton.jit
def pairs_of(list_ptr, expert, o_m, m_m, is_shared, tokens, SLOTS: tl.constexpr, TOP_K: tl.constexpr):
    """Entries o_m of an expert's list; is_shared: of the shared expert's."""
    if SLOTS > TOP_K:
        b_pair = tl.load(list_ptr + expert * tokens + o_m, mask=m_m & (is_shared == 0), other=0)
        b_pair = tl.where(is_shared, o_m * SLOTS + TOP_K, b_pair)
    else:
        b_pair = tl.load(list_ptr + expert * tokens + o_m, mask=m_m, other=0)
    return b_pair


@dataclass(frozen=True, slots=True)
class Lists:
    """count [E * COUNT_STRIDE] int32, one in COUNT_STRIDE used; entries [E, T] int32; slots: numbers a token has."""

    count: Tensor
    entries: Tensor
    slots: int


def empty_lists(tokens: int, local_experts: int, slots: int, device: torch.device) -> Lists:
    """Room for lists. The counters have to be set to 0."""
    count = torch.empty(local_experts * COUNT_STRIDE.value, dtype=torch.int32, device=device)
    return Lists(count, torch.empty((local_experts, tokens), dtype=torch.int32, device=device), slots)


def listed(chosen: Tensor, first_expert: int, local_experts: int) -> Lists:
    """The lists of chosen [T, k], contiguous."""
    tokens, top_k = chosen.shape
    lists = empty_lists(tokens, local_experts, top_k, chosen.device)
    lists.count.zero_()
    part = 128
    list_pairs[(cdiv(tokens * top_k, part),)](
        chosen, lists.count, lists.entries, tokens, first_expert, local_experts,
        TOP_K=top_k, PART=part, **dependent_launch(chosen),
    )  # fmt: skip
    return lists


def tiled(lists: Lists, block_m: int, bound: int, has_shared: bool) -> tuple[Tensor, Tensor]:
    """(tile, tiles), as `plan_tiles` says; `bound` tiles at most."""
    local_experts, tokens = lists.entries.shape
    tile = torch.empty((bound, 3), dtype=torch.int32, device=lists.count.device)
    tiles = torch.empty(1, dtype=torch.int32, device=lists.count.device)
    plan_tiles[(1,)](
        lists.count, tile, tiles, tokens, local_experts, BINS=power_of_two(local_experts + 1),
        BLOCK_M=block_m, HAS_SHARED=has_shared, **dependent_launch(lists.count),
    )  # fmt: skip
    return tile, tiles
