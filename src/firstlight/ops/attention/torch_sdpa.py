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
from firstlight.ops.write_kv import FP8, bits_of

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


def workspace(call: Call) -> int:
    """Gathered keys and values with their mask, of all requests where they have few tokens, else of one: bytes.

    A bound: on the CPU nothing longer than the longest request is gathered.
    """
    q, k_pages, pages = call.args[0], call.args[1], call.args[3]
    query, size = call.kwargs["max_query"], k_pages.shape[1]
    keys = min(-(-call.kwargs["max_context"] // size), pages.shape[1]) * size
    together = call.args[6].shape[0] if query <= FEW_QUERIES else 1
    # FP8 pages are gathered as they are, then converted: keys or values are there twice for a moment.
    row_bytes = 2 * q.element_size() + (k_pages.element_size() if k_pages.dtype != q.dtype else 0)
    rows = keys * k_pages.shape[2] * k_pages.shape[3] * row_bytes
    return together * (rows + keys * query * (1 + q.element_size())) + 2 * q.nbytes


def when(call: Call) -> str | None:
    if call.kwargs.get("sinks") is not None:
        return "torch's attention knows no sinks"
    if call.args[1].dtype not in (call.dtype, FP8):
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
    requests, size, kv_heads = length.shape[0], *k_pages.shape[1:3]
    group = heads // kv_heads
    tables = tables[:, : -(-longest_context(length, max_context) // size)]
    key = torch.arange(tables.shape[1] * size, device=q.device)
    here = (tables > 0).repeat_interleave(size, dim=1) & (key < length[:, None])  # [R, keys]
    k, v = (_gather(pool, tables, here, q.dtype) for pool in (k_pages, v_pages))  # [R, KV, keys, D]

    count = query_start[1:] - query_start[:-1]
    offset = torch.arange(max_query, device=q.device)
    token = (query_start[:-1, None] + offset).clamp(max=tokens - 1)  # [R, max_query]
    index = length[:, None] - count[:, None] + offset
    seen = _seen(here[:, None, :], index[:, :, None], key, causal, window)

    queries = q[token].unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [R, KV, g max_query, D]
    mask = seen[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    result = _attend(queries, k, v, mask, scale)
    result = result.unflatten(2, (group, max_query)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [R, max_query, H, D]

    every = torch.arange(tokens, device=q.device, dtype=query_start.dtype)
    request = torch.searchsorted(query_start[1:].contiguous(), every, right=True).clamp(max=requests - 1)
    place = (every - query_start[request]).clamp(min=0, max=max_query - 1)
    return result[request, place]


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
    size, group = k_pages.shape[1], q.shape[1] // k_pages.shape[2]
    table = table[None, : -(-context // size)]
    key = torch.arange(table.shape[1] * size, device=q.device)
    here = (table > 0).repeat_interleave(size, dim=1) & (key < context)
    k, v = (_gather(pool, table, here, q.dtype)[0, :, None].expand(-1, group, -1, -1) for pool in (k_pages, v_pages))
    seen = _seen(here, key[context - q.shape[0] : context, None], key, causal, window)
    result = _attend(q.unflatten(1, (-1, group)).permute(1, 2, 0, 3), k, v, seen, scale)  # [KV, g, N, D]
    return result.permute(2, 0, 1, 3).flatten(1, 2)


def longest_context(length: Tensor, max_context: int) -> int:
    """What to pad contexts to: the longest where reading it costs nothing, elsewhere the bound."""
    return max(1, int(length.max())) if length.device.type == "cpu" else max_context


def _gather(pool: Tensor, tables: Tensor, here: Tensor, dtype: torch.dtype) -> Tensor:
    """Pages of all requests in `dtype`, [R, KV, keys, D], zeros wherever there is no key: what lies there may be NaN."""
    chosen = tables.flatten().clamp(min=0)
    rows = bits_of(pool).index_select(0, chosen)  # far quicker than pool[...], whatever the strides
    rows = rows.view(pool.dtype).to(dtype)
    here = here.view(rows.shape[:2])
    if rows.device.type == "cpu":  # few pages have holes, and looking for them costs nothing
        partial = (~here.all(dim=1)).nonzero()[:, 0]
        kept = rows.index_select(0, partial).masked_fill_(~here.index_select(0, partial)[:, :, None, None], 0)
        rows.index_copy_(0, partial, kept)
    else:
        rows.masked_fill_(~here[:, :, None, None], 0)
    return rows.view(tables.shape[0], -1, *rows.shape[2:]).transpose(1, 2)


def _seen(here: Tensor, index: Tensor, key: Tensor, causal: bool, window: int) -> Tensor:
    """Which keys a query at `index` attends to, among those that are there."""
    seen = here & (key <= index) if causal else here.expand(torch.broadcast_shapes(here.shape, index.shape))
    return seen & (key > index - window) if window > 0 else seen


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """torch's attention, with zeros for queries that see no key: not all of its kernels promise them."""
    result = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return torch.where(seen.any(dim=-1, keepdim=True), result, result.new_zeros(()))
