"""Choosing, for each token, the few keys that its attention will see: the indexer of sparse latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.attention import read_pages
from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.precision import wide_dtype
from firstlight.quant import dtype_name


def body(
    q: Tensor,
    weights: Tensor,
    key_pages: Tensor,
    pages: Tensor,
    row: Tensor,
    query_start: Tensor,
    length: Tensor,
    *,
    top: int,
    scale: float,
    max_query: int,
    max_context: int,
    out: Tensor | None = None,
) -> Tensor:
    """out[t] = the `top` places s, s at most t's own, with the largest sum over h of weights[t, h] relu(q[t, h] . k[s]) scale.

    q [T, H, D]; weights [T, H]; key_pages [P, S, 1, D]; pages, row, query_start, length, max_query, max_context: as in
    `attention`. out: written and returned, if given. Among equals the lower place wins. Returns [T, top] int32 in falling
    order of score, -1 behind where a token has fewer places. In float32 (float64 if q is).
    Tolerance: a place may be another whose score differs by no more than the rounding of the products.
    Source: DeepSeek-V3.2-Exp, section 2.1 ("lightning indexer"); transformers `DeepseekV32Indexer`.
    """
    kind = wide_dtype(q.dtype)
    result = torch.full((q.shape[0], top), -1, dtype=torch.int32, device=q.device) if out is None else out.fill_(-1)
    starts, lengths, rows = query_start.tolist(), length.tolist(), row.tolist()
    for r, context in enumerate(lengths):
        begin, end = starts[r], starts[r + 1]
        if begin == end or context <= 0:
            continue
        table = pages[rows[r], : -(-context // key_pages.shape[1])]
        keys, present = read_pages(key_pages, table, context)
        products = torch.einsum("nhd,jd->nhj", q[begin:end].to(kind), keys[:, 0].to(kind)).relu()
        scores = torch.einsum("nh,nhj->nj", weights[begin:end].to(kind), products) * scale
        place = torch.arange(context - (end - begin), context, device=q.device)[:, None]
        seen = present & (torch.arange(context, device=q.device) <= place)
        scores = scores.masked_fill(~seen, -torch.inf)
        value, best = scores.sort(dim=-1, descending=True, stable=True)
        best = best.masked_fill(value == -torch.inf, -1)[:, :top]
        result[begin:end, : best.shape[1]] = best.int()
    return result


def abstract(q: Tensor, *args: object, top: int, out: Tensor | None = None, **kwargs: object) -> Tensor:
    """[T, top] int32."""
    return q.new_empty((q.shape[0], top), dtype=torch.int32) if out is None else out


def cost(
    shape: Shape, q: Tensor, weights: Tensor, key_pages: Tensor, *args: object, top: int, **kwargs: object
) -> Cost:
    """Each key once for all heads and tokens of its request; a product for each (token, key, head)."""
    heads, dim = q.shape[1:]
    return Cost(
        {dtype_name(q.dtype): 2.0 * shape.query_keys * heads * dim},
        read=shape.keys_read * dim * key_pages.element_size()
        + shape.tokens * heads * (dim * q.element_size() + weights.element_size()),
        written=shape.tokens * top * 4,
    )


select_keys = Op("select_keys", body, abstract=abstract, cost=cost, mutates={"out": ""})
