"""Attention of new tokens to the keys and values of their requests, which lie in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.attention import hopper_paged, torch_sdpa, triton_paged
from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.write_kv import bits_of
from firstlight.quant import dtype_name


def body(
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
    """out[t] = sum over keys j of softmax_j(scale q[t] . k[j]) v[j], for each head.

    q [T, H, D]; k_pages, v_pages [P, S, KV, D] in q.dtype or float8_e4m3fn, any strides but 1 for D; query heads
    j g .. (j + 1) g - 1 read KV head j, where g = H / KV. pages [rows, n]: the pages of a request in order, in row[r] of the table; a page <= 0 is null.
    query_start [R + 1]: tokens of request r are query_start[r] .. query_start[r + 1] - 1; length [R]: its context with
    this step, so token t stands at i = length[r] - (query_start[r + 1] - t). Integers are int32 or int64.
    Keys: those at j < length[r] in pages that aren't null; with `causal`, j <= i; with `window` > 0, j > i - window.
    Whatever else the pages hold is never read into a result (it may be NaN). A token without keys gets zeros.
    sinks [H]: a logit for each head that takes part in the softmax with a value of zero.
    max_query, max_context: bounds of a request's tokens and of length in this step.
    out: written and returned, if given. Tokens in no request: unspecified.
    Returns [T, H, D] in q.dtype. Scores, softmax and sum are in float32 (float64 for float64 inputs), rounded once.
    Tolerance: 1e-5 of the largest |v| in float32; in lower precision probabilities may be rounded to q.dtype too.
    Source: 1706.03762 equation 1; grouped as in 2305.13245.
    """
    result = q.new_zeros(q.shape) if out is None else out.zero_()
    starts, lengths, rows = query_start.tolist(), length.tolist(), row.tolist()
    for r, context in enumerate(lengths):
        begin, end = starts[r], starts[r + 1]
        if begin == end or context <= 0:
            continue
        table = pages[rows[r], : -(-context // k_pages.shape[1])]
        keys, present = read_pages(k_pages, table, context)
        values, _ = read_pages(v_pages, table, context)
        index = torch.arange(context - (end - begin), context, device=q.device)[:, None]
        key = torch.arange(context, device=q.device)
        seen = present.expand(end - begin, -1)
        if causal:
            seen = seen & (key <= index)
        if window > 0:
            seen = seen & (key > index - window)
        result[begin:end] = _attend(q[begin:end], keys, values, seen, scale, sinks)
    return result


def read_pages(pool: Tensor, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The first `context` rows of a request's pages, [context, KV, D], zeros in null pages; and which are there."""
    present = (table > 0).repeat_interleave(pool.shape[1])[:context]
    rows = bits_of(pool).index_select(0, table.clamp(min=0)).flatten(0, 1)[:context]
    return torch.where(present[:, None, None], rows, rows.new_zeros(())).view(pool.dtype), present


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """q [N, H, D], k and v [L, KV, D], seen [N, L] -> [N, H, D]."""
    kind = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(kind).unflatten(1, (k.shape[1], -1))  # [N, KV, g, D]
    scores = torch.einsum("nkgd,lkd->kgnl", grouped, k.to(kind)) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    highest = scores.amax(dim=-1, keepdim=True)
    highest = highest.clamp(min=torch.finfo(kind).min)  # finite for tokens without keys, whose weights are all zero
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:  # one far above the scores gives an infinite total, so weights of zero
        total = total + torch.exp(sinks.to(kind).reshape(k.shape[1], -1, 1, 1) - highest)
    weights = weights / total.clamp(min=torch.finfo(kind).tiny)
    return torch.einsum("kgnl,lkd->nkgd", weights, v.to(kind)).flatten(1, 2).to(q.dtype)


def abstract(
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
    return q.new_empty(q.shape) if out is None else out


def cost(
    shape: Shape,
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
) -> Cost:
    """Each key and value that a request reads, once for all its tokens; two products for each (token, key, head).

    With a window, both sums are cut to it: a bound, since the sums don't say how contexts are distributed.
    """
    keys, pairs = shape.keys_read, shape.query_keys
    if window > 0:
        keys = _smaller(keys, shape.requests * (window + max_query))
        pairs = _smaller(pairs, shape.tokens * window)
    heads, dim = q.shape[1:]
    row_bytes = k_pages.shape[2] * dim * (k_pages.element_size() + v_pages.element_size())
    operations = 4.0 * pairs * heads * dim
    multiplied = dtype_name(q.dtype)
    return Cost({multiplied: operations}, read=q.nbytes + keys * row_bytes, written=q.nbytes)


def _smaller(a: float, b: float) -> float:
    """min, for numbers and numpy arrays alike."""
    return a + (b - a) * (b < a)


attention = Op("attention", body, abstract=abstract, cost=cost, mutates={"out": ""})
attention.provide("torch_sdpa", torch_sdpa.run, when=torch_sdpa.when, workspace=torch_sdpa.workspace)
attention.provide("triton_paged", triton_paged.run, when=triton_paged.when, rank=5, workspace=triton_paged.workspace)
attention.provide("hopper_paged", hopper_paged.run, when=hopper_paged.when, rank=6)
