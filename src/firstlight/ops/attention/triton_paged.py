"""Paged attention: one program for the query heads that share a KV head, so that a key is read once for all of them.

Its rows are (token, query head of the group) pairs: a decode step has a group's heads in a tile of 16 rows, a prefill 128
rows of consecutive tokens. Where the new tokens of a request are one tile, contexts are split over programs until they fill the
GPU, and a second kernel merges what the splits found, each with its own largest score and sum. In a prefill, keys that all
rows of a tile see go by without masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import (
    float8_pages_unavailable,
    multiprocessors,
    power_of_two,
    request_block,
    unavailable,
)

LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a call is cut. tokens: new tokens in a tile of `rows` rows; keys: of one step of the loop over the context."""

    tokens: int
    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def when(call: Call) -> str | None:
    """Every call in 32 bits or fewer with heads of at most 256 dimensions, over pages of q's dtype or of e4m3."""
    if reason := unavailable(call.hardware):
        return reason
    q, k_pages, v_pages = call.args[0], call.args[1], call.args[2]
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes in float32 from 16 or 32 bits, not with {q.dtype} queries"
    if q.shape[-1] > LARGEST_HEAD:
        return f"holds heads of at most {LARGEST_HEAD} dimensions in registers, not {q.shape[-1]}"
    if k_pages.stride(-1) != 1 or v_pages.stride(-1) != 1:
        return "reads pages whose head dimensions are dense"
    if call.kwargs["scale"] < 0:
        return f"needs a scale of at least 0, not {call.kwargs['scale']}"
    return float8_pages_unavailable(call.hardware, k_pages, v_pages)


def workspace(call: Call) -> int:
    """What the splits of a call found: bytes."""
    q, k_pages = call.args[0], call.args[1]
    requests = call.args[6].shape[0]
    tiles = choose_tiles(
        q, k_pages, requests, call.kwargs["max_query"], call.kwargs["max_context"], call.hardware.multiprocessors,
        hip=call.hardware.kind == "hip",
    )  # fmt: skip
    return 0 if tiles.splits == 1 else q.shape[0] * q.shape[1] * tiles.splits * (q.shape[2] + 2) * 4


def choose_tiles(
    q: Tensor,
    k_pages: Tensor,
    requests: int,
    max_query: int,
    max_context: int,
    multiprocessors: int,
    *,
    hip: bool = False,
) -> Tiles:
    """Tiles by bounds known to the host; one for a bucket. hip: the GPU is AMD's, with 64 KB of shared memory for a program."""
    heads = q.shape[1]
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    wide = q.dtype.itemsize > 2
    if max_query * group <= 64:
        rows = max(16, power_of_two(max_query * group))
        keys = (32 if wide else 64) // (2 if hip else 1)
        splits = choose_splits(requests * kv_heads, max_context // keys, multiprocessors)
        return Tiles(max_query, rows, keys, splits, warps=4, stages=2 if hip else 3)
    rows = max(64 if wide else 128, power_of_two(group))
    keys = 16 if wide else 32 if hip else 64
    return Tiles(max(1, rows // group), rows, keys, splits=1, warps=8, stages=2)


@lru_cache(1024)
def choose_splits(programs: int, most: int, slots: int) -> int:
    """The split of contexts that fills `slots` concurrent programs best; each wave of programs costs its start."""

    def time(splits: int) -> float:
        waves = -(-programs * splits // slots)
        return waves * slots / (programs * splits) + 0.02 * waves

    return min(range(1, max(1, min(64, most)) + 1), key=time)


def run(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    row: Tensor,
    query_start: Tensor,
    length: Tensor,
    *,
    scale: float,
    max_query: int,
    max_context: int,
    causal: bool = True,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
    tiles: Tiles | None = None,
) -> Tensor:
    """The contract of `attention`. tiles: how to cut the call, instead of `choose_tiles`."""
    from firstlight.ops.attention.triton_paged_kernels import merge_kernel, prefill_kernel, split_kernel

    if q.stride(-1) != 1:
        raise ValueError(f"attention: the dimensions of a head must be dense, but q's strides are {q.stride()}")
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tokens, heads, dim = q.shape
    requests, kv_heads = length.shape[0], k_pages.shape[2]
    if tokens == 0 or requests == 0:
        return result
    if tiles is None:
        at_once, hip = multiprocessors(q.device), torch.version.hip is not None
        tiles = choose_tiles(q, k_pages, requests, max_query, max_context, at_once, hip=hip)
    block_dim = max(16, power_of_two(dim))
    if max_query > tiles.tokens:
        prefill_kernel[(kv_heads, -(-tokens // tiles.tokens) + requests)](
            q,
            k_pages,
            v_pages,
            pages,
            row,
            query_start,
            length,
            sinks,
            result,
            scale,
            requests,
            window,
            q.stride(0),
            q.stride(1),
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            pages.stride(0),
            result.stride(0),
            result.stride(1),
            H=heads,
            KV=kv_heads,
            D=dim,
            PAGE=k_pages.shape[1],
            BLOCK_D=block_dim,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            BLOCK_R=request_block(requests),
            TOKENS=tiles.tokens,
            CAUSAL=causal,
            HAS_WINDOW=window > 0,
            HAS_SINKS=sinks is not None,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
        )
        return result
    partial = summary = result
    if tiles.splits > 1:
        partial = torch.empty((tokens, heads, tiles.splits, dim), dtype=torch.float32, device=q.device)
        summary = torch.empty((tokens, heads, tiles.splits, 2), dtype=torch.float32, device=q.device)
    split_kernel[(kv_heads * tiles.splits, requests)](
        q,
        k_pages,
        v_pages,
        pages,
        row,
        query_start,
        length,
        sinks,
        result,
        partial,
        summary,
        scale,
        window,
        tiles.splits,
        q.stride(0),
        q.stride(1),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        pages.stride(0),
        result.stride(0),
        result.stride(1),
        H=heads,
        KV=kv_heads,
        D=dim,
        PAGE=k_pages.shape[1],
        BLOCK_D=block_dim,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        IS_SPLIT=tiles.splits > 1,
        CAUSAL=causal,
        HAS_WINDOW=window > 0,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if tiles.splits > 1:
        merge_kernel[(tokens, heads)](
            partial,
            summary,
            sinks,
            result,
            tiles.splits,
            result.stride(0),
            result.stride(1),
            H=heads,
            D=dim,
            BLOCK_D=block_dim,
            BLOCK_S=max(16, power_of_two(tiles.splits)),
            HAS_SINKS=sinks is not None,
            num_warps=4,
        )
    return result
