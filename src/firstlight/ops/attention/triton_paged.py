"""Paged attention: one program for the query heads that share a KV head, so that a key is read once for all of them.

Its rows are (token, query head of the group) pairs: a decode step has a group's heads in a tile of 16 rows, a prefill 128
rows of consecutive tokens. Where requests and KV heads are too few to fill a GPU, contexts are split over programs, and a
second kernel merges what the splits found, each with its own largest score and sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable

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
    """Every call in 32 bits or fewer with heads of at most 256 dimensions."""
    if reason := unavailable(call.hardware):
        return reason
    q, k_pages, v_pages = call.args[0], call.args[1], call.args[2]
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes in float32 from 16 or 32 bits, not with {q.dtype} queries"
    if q.shape[-1] > LARGEST_HEAD:
        return f"holds heads of at most {LARGEST_HEAD} dimensions in registers, not {q.shape[-1]}"
    if k_pages.stride(-1) != 1 or v_pages.stride(-1) != 1:
        return "reads pages whose head dimensions are dense"
    return None


def workspace(call: Call) -> int:
    """What the splits of a call found: bytes."""
    q, k_pages = call.args[0], call.args[1]
    requests = call.args[6].shape[0]
    tiles = choose_tiles(
        q, k_pages, requests, call.kwargs["max_query"], call.kwargs["max_context"], call.hardware.multiprocessors
    )
    return 0 if tiles.splits == 1 else q.shape[0] * q.shape[1] * tiles.splits * (q.shape[2] + 2) * 4


def choose_tiles(
    q: Tensor, k_pages: Tensor, requests: int, max_query: int, max_context: int, multiprocessors: int
) -> Tiles:
    """Tiles by bounds known to the host; one for a bucket."""
    tokens, heads = q.shape[:2]
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    wide = q.dtype.itemsize > 2
    if max_query * group <= 64:
        rows = max(16, power_of_two(max_query * group))
        tile_tokens, keys, warps, stages = max_query, 32 if wide else 64, 4, 3
        tiles = requests
    else:
        rows = max(64 if wide else 128, power_of_two(group))
        tile_tokens, keys, warps, stages = max(1, rows // group), 32, 8, 2 if wide else 3
        tiles = -(-tokens // tile_tokens) + requests
    programs = tiles * kv_heads
    splits = choose_splits(programs, max_context // keys, multiprocessors)
    return Tiles(tile_tokens, rows, keys, splits if tiles == requests else 1, warps, stages)


def choose_splits(programs: int, most: int, slots: int) -> int:
    """The split of contexts that fills `slots` concurrent programs best; each wave of programs costs its start."""

    def time(splits: int) -> float:
        waves = -(-programs * splits // slots)
        return waves * slots / (programs * splits) + 0.02 * waves

    return min(range(1, max(1, min(64, most)) + 1), key=time)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


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
    from firstlight.ops.attention.triton_paged_kernels import attention_kernel, merge_kernel

    if q.stride(-1) != 1:
        raise ValueError(f"attention: the dimensions of a head must be dense, but q's strides are {q.stride()}")
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tokens, heads, dim = q.shape
    requests, kv_heads = length.shape[0], k_pages.shape[2]
    if tokens == 0 or requests == 0:
        return result
    if tiles is None:
        tiles = choose_tiles(q, k_pages, requests, max_query, max_context, multiprocessors(q.device))
    single = max_query <= tiles.tokens
    blocks = requests if single else -(-tokens // tiles.tokens) + requests
    partial = summary = result
    if tiles.splits > 1:
        partial = torch.empty((tokens, heads, tiles.splits, dim), dtype=torch.float32, device=q.device)
        summary = torch.empty((tokens, heads, tiles.splits, 2), dtype=torch.float32, device=q.device)
    block_dim = max(16, power_of_two(dim))
    attention_kernel[(kv_heads * tiles.splits, blocks)](
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
        BLOCK_R=power_of_two(requests),
        TOKENS=tiles.tokens,
        SPLITS=tiles.splits,
        ONE_BLOCK=single,
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
            result.stride(0),
            result.stride(1),
            H=heads,
            D=dim,
            BLOCK_D=block_dim,
            SPLITS=tiles.splits,
            BLOCK_S=power_of_two(tiles.splits),
            HAS_SINKS=sinks is not None,
            num_warps=4,
        )
    return result


def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side, at one a multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
