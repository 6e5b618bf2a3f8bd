"""Prompts on Hopper GPUs: pages brought by TMA and a warp of its own, two groups of warps that multiply and soften in turn.

A program takes 128 rows, (token, query head of the group) pairs, of one request and walks its whole context, a page at a time.
Pages are described to TMA as [pages, page, KV head, dimension] with their own strides, so that a pool may lie in memory in any
way, and its rows are addressed by page number, in 64 bits. The description travels with the launch: nothing is written to memory
for it, and a captured graph has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import hopper_unavailable, power_of_two, request_block

PAGE = 64
"""Tokens: a page is the tile of keys that the matrix unit takes."""
HEADS = (128, 256)
"""Dimensions of a head."""
ROWS = 128
"""Of a program."""
LARGEST_GROUP = 64
"""Heads: the rows of a group of warps hold whole tokens."""
LEAST_ROWS = 65
"""Of a request. With fewer, `triton_paged` splits contexts over programs."""
STAGES = 2
"""Pages of keys, and of values, on their way or in use."""
TRANSFER = 16
"""Bytes: what TMA asks of addresses and strides to be a multiple of."""


def when(call: Call) -> str | None:
    """Prompts in 16 bits over pages of 64 tokens, without a window, on sm_90."""
    if reason := hopper_unavailable(call.hardware):
        return reason
    q, k_pages, v_pages = call.args[:3]
    _, heads, dim = q.shape
    _, page, kv_heads, _ = k_pages.shape
    group, rows = heads // kv_heads, call.kwargs["max_query"] * (heads // kv_heads)
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bfloat16 and float16, not {q.dtype}"
    if k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        return f"the pages are {k_pages.dtype}, the queries {q.dtype}"
    if page != PAGE:
        return f"serves pages of {PAGE} tokens, not {page}"
    if dim not in HEADS:
        return f"serves heads of {' or '.join(map(str, HEADS))} dimensions, not {dim}"
    if group > LARGEST_GROUP or group != power_of_two(group):
        return f"serves groups of 1, 2, 4, ... {LARGEST_GROUP} query heads a KV head, not {group}"
    if call.kwargs.get("window", 0) > 0:
        return "reads whole contexts, not a window"
    if call.kwargs["scale"] <= 0:
        return f"needs a scale above 0, not {call.kwargs['scale']}"
    if rows < LEAST_ROWS:
        return f"serves prompts of {LEAST_ROWS} rows (tokens x heads of a group) or more, not {rows}"
    return cannot_transfer(k_pages) or cannot_transfer(v_pages)


def cannot_transfer(pages: Tensor) -> str | None:
    """Why TMA can't read these pages, or None."""
    *strides, last = (stride * pages.element_size() for stride in pages.stride())
    if last == pages.element_size() and not any(stride % TRANSFER for stride in (*strides, pages.data_ptr())):
        return None
    return (
        f"reads pages by TMA, which needs dense heads, and addresses and strides that are multiples of {TRANSFER} bytes; these lie "
        f"at {pages.data_ptr():#x} with strides of {pages.stride()} elements of {pages.element_size()} bytes"
    )


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
) -> Tensor:
    """The contract of `attention`. Page numbers below 2^31.

    Raises ValueError for pages of another size, and for strides and addresses that TMA can't read: a host may have laid out its
    memory after binding. A pool of the null page alone may have any size of page.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from firstlight.ops.attention.hopper_paged_kernels import prefill_kernel

    if q.stride(-1) != 1:
        raise ValueError(f"attention: the dimensions of a head must be dense, but q's strides are {q.stride()}")
    size, reason = k_pages.shape[1], cannot_transfer(k_pages) or cannot_transfer(v_pages)
    if size != PAGE and k_pages.shape[0] > 1:
        reason = f"serves pages of {PAGE} tokens, not {size}"
    if reason:
        raise ValueError(f"attention: hopper_paged {reason}; choose another provider: --op attention=triton_paged")
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tokens, heads, dim = q.shape
    requests, kv_heads = length.shape[0], k_pages.shape[2]
    if tokens == 0 or requests == 0:
        return result
    # Swizzled by 128 bytes, as the matrix unit reads them.
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    described = [
        TensorDescriptor(pool, list(pool.shape), list(pool.stride()), [1, PAGE, 1, dim], layout)
        for pool in (k_pages, v_pages)
    ]
    blocks = -(-tokens // (ROWS * kv_heads // heads)) + requests
    # By Triton's own launcher: `triton_launch` knows pointers and numbers, not tensors described to TMA.
    prefill_kernel[(kv_heads, blocks)](
        q,
        *described,
        pages,
        row,
        query_start,
        length,
        sinks,
        result,
        scale,
        requests,
        q.stride(0),
        q.stride(1),
        pages.stride(0),
        result.stride(0),
        result.stride(1),
        H=heads,
        KV=kv_heads,
        D=dim,
        PAGE=PAGE,
        BLOCK_R=request_block(requests),
        STAGES=STAGES,
        CAUSAL=causal,
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )
    return result
