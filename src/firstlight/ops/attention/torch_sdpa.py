"""Paged attention by torch's fused attention over gathered pages.

With few tokens a request (decode, verify), all requests are one padded batch. The query heads that share a KV head lie
along the query axis, so keys and values are gathered once and never repeated. With many (prefill), requests go one by one:
padding them to the longest would cost more than the calls.

On the CPU the lengths are read, which is cheap there, and nothing longer than the longest request is gathered. Elsewhere
the batch is padded to `max_context`, so that nothing waits for the device and it can be captured in a graph; only the
prefill path reads lengths on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.ops.op import Call

FEW_QUERIES = 8


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
    tables = pages.index_select(0, row)
    if max_query <= FEW_QUERIES:
        result = _padded(
            q, k_pages, v_pages, tables, query_start, length, scale, max_query, max_context, causal, window
        )
        return result if out is None else out.copy_(result)
    result = q.new_zeros(q.shape) if out is None else out.zero_()
    starts = query_start.tolist()
    for r, context in enumerate(length.tolist()):
        begin, end = starts[r], starts[r + 1]
        if begin < end and context > 0:
            result[begin:end] = _single(q[begin:end], k_pages, v_pages, tables[r], context, scale, causal, window)
    return result


def when(call: Call) -> str | None:
    if call.kwargs.get("sinks") is not None:
        return "torch's attention knows no sinks"
    if call.args[1].dtype != call.dtype:
        return f"the pages are {call.args[1].dtype}, the queries {call.dtype}"
    return None


def _padded(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    query_start: Tensor,
    length: Tensor,
    scale: float,
    max_query: int,
    max_context: int,
    causal: bool,
    window: int,
) -> Tensor:
    """All requests as a batch of `max_query` queries and the longest context."""
    tokens, heads = q.shape[:2]
    requests, size = length.shape[0], k_pages.shape[1]
    longest = max(1, int(length.max())) if q.device.type == "cpu" else max_context
    tables = tables[:, : -(-longest // size)].long()
    longest = min(longest, tables.shape[1] * size)

    key = torch.arange(longest, device=q.device)
    here = (tables > 0).repeat_interleave(size, dim=1)[:, :longest] & (key < length[:, None])
    k = _gather(k_pages, tables, here, longest)
    v = _gather(v_pages, tables, here, longest)

    count = query_start[1:] - query_start[:-1]
    offset = torch.arange(max_query, device=q.device)
    token = (query_start[:-1, None] + offset).clamp(max=tokens - 1)
    index = length[:, None] - count[:, None] + offset  # [R, max_query]
    seen = _seen(here[:, None, :], index[:, :, None], key, causal, window)

    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    grouped = q[token].unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4)  # [R, KV, g, max_query, D]
    mask = seen[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    result = functional.scaled_dot_product_attention(grouped.flatten(2, 3), k, v, attn_mask=mask, scale=scale)
    result = torch.where(mask.any(dim=-1, keepdim=True), result, result.new_zeros(()))
    result = result.unflatten(2, (group, max_query)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [R, max_query, H, D]

    every = torch.arange(tokens, device=q.device, dtype=query_start.dtype)
    request = torch.searchsorted(query_start[1:].contiguous(), every, right=True).clamp(max=requests - 1)
    place = (every - query_start[request]).clamp(min=0, max=max_query - 1)
    return result[request, place]


def _gather(pool: Tensor, tables: Tensor, here: Tensor, longest: int) -> Tensor:
    """Rows of all requests, [R, KV, longest, D], with zeros wherever there is no key (stale rows may hold NaN)."""
    rows = pool[tables.clamp(min=0)].flatten(1, 2)[:, :longest]
    return rows.masked_fill_(~here[:, :, None, None], 0).transpose(1, 2)


def _seen(here: Tensor, index: Tensor, key: Tensor, causal: bool, window: int) -> Tensor:
    """Which keys a query at `index` attends to, among those that are there."""
    seen = here & (key <= index) if causal else here.expand(torch.broadcast_shapes(here.shape, index.shape))
    return seen & (key > index - window) if window > 0 else seen


def _single(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    context: int,
    scale: float,
    causal: bool,
    window: int,
) -> Tensor:
    """One request: q [N, H, D] -> [N, H, D]."""
    count, size = q.shape[0], k_pages.shape[1]
    table = table[: -(-context // size)].long()[None]
    here = (table > 0).repeat_interleave(size, dim=1)[:, :context]
    group = q.shape[1] // k_pages.shape[2]
    k, v = (_gather(pool, table, here, context)[0] for pool in (k_pages, v_pages))
    queries = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [KV, g, N, D]
    k, v = (rows[:, None].expand(-1, group, -1, -1) for rows in (k, v))
    key = torch.arange(context, device=q.device)
    seen = _seen(here, torch.arange(context - count, context, device=q.device)[:, None], key, causal, window)
    result = functional.scaled_dot_product_attention(queries, k, v, attn_mask=seen, scale=scale)
    result = torch.where(seen.any(dim=-1, keepdim=True), result, result.new_zeros(()))
    return result.permute(2, 0, 1, 3).flatten(1, 2)
