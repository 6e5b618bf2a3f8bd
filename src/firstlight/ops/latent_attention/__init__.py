"""Attention whose keys and values are widened from one latent row a token, which is all that the cache keeps.

There are two ways to the same result. *Widened*: keys and values of every head are made from the latents, then attention is
as usual; few operations for each pair, so prefill takes it. *Absorbed*: queries are taken into the latents' space, and what
comes out is taken back; each row of the cache is read once for all heads, so decode takes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.attention import read_pages
from firstlight.ops.op import Cost, Op, Shape
from firstlight.quant import Weight, dtype_name, nbytes, unpack


def body(
    q: Tensor,
    latent_pages: Tensor,
    pages: Tensor,
    row: Tensor,
    query_start: Tensor,
    length: Tensor,
    kv_b: Weight,
    *,
    nope: int,
    value_dim: int,
    scale: float,
    max_query: int,
    max_context: int,
    absorbed: bool,
    selected: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[t, h] = sum over keys j of softmax_j(scale q[t, h] . (K_h c[j] | r[j])) V_h c[j].

    q [T, H, N + R], N = nope; latent_pages [P, S, 1, L + R] hold c | r; kv_b [H (N + V), L], plain or packed: for each head
    the N rows of K_h, then the V = value_dim rows of V_h. pages, row, query_start, length, max_query, max_context: as in
    `attention`, causal. selected [T, n] int32: the only places that a token sees, -1 for none (as are those past
    its own); None: all up to its own.
    absorbed: which way a provider goes; the result is the same.
    out: written and returned, if given. Returns [T, H, V] in q.dtype; all in float32 (float64 if q is), rounded once.
    Tolerance: 1e-5 of the largest value in float32; in lower precision, widened keys and values may be rounded to q.dtype.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    tokens, heads, _ = q.shape
    weight = unpack(kv_b, kind)
    latent = weight.shape[1]
    weight = weight.view(heads, nope + value_dim, latent)
    result = q.new_zeros((tokens, heads, value_dim)) if out is None else out.zero_()
    starts, lengths, rows = query_start.tolist(), length.tolist(), row.tolist()
    for r, context in enumerate(lengths):
        begin, end = starts[r], starts[r + 1]
        if begin == end or context <= 0:
            continue
        table = pages[rows[r], : -(-context // latent_pages.shape[1])]
        cached, present = read_pages(latent_pages, table, context)
        c, rope = cached[:, 0, :latent].to(kind), cached[:, 0, latent:].to(kind)
        widened = torch.einsum("hwl,jl->hjw", weight, c)
        query = q[begin:end].to(kind)
        scores = torch.einsum("nhd,hjd->hnj", query[..., :nope], widened[..., :nope])
        scores = (scores + torch.einsum("nhd,jd->hnj", query[..., nope:], rope)) * scale
        place = torch.arange(context - (end - begin), context, device=q.device)[:, None]
        seen = present & (torch.arange(context, device=q.device) <= place)
        if selected is not None:
            chosen = torch.zeros(end - begin, context + 1, dtype=torch.bool, device=q.device)
            wanted = selected[begin:end].long()
            chosen.scatter_(1, torch.where((wanted < 0) | (wanted > context), context, wanted), True)
            seen = seen & chosen[:, :context]
        scores = scores.masked_fill(~seen, -torch.inf)
        highest = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(kind).min)
        weights = torch.exp(scores - highest)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(kind).tiny)
        result[begin:end] = torch.einsum("hnj,hjv->nhv", weights, widened[..., nope:]).to(q.dtype)
    return result


def abstract(q: Tensor, *args: object, value_dim: int, out: Tensor | None = None, **kwargs: object) -> Tensor:
    """[T, H, V] in q.dtype."""
    return q.new_empty((*q.shape[:2], value_dim)) if out is None else out


def cost(
    shape: Shape,
    q: Tensor,
    latent_pages: Tensor,
    pages: Tensor,
    row: Tensor,
    query_start: Tensor,
    length: Tensor,
    kv_b: Weight,
    *,
    nope: int,
    value_dim: int,
    scale: float,
    max_query: int,
    max_context: int,
    absorbed: bool,
    selected: Tensor | None = None,
    out: Tensor | None = None,
) -> Cost:
    """Cache rows once for all heads, the weight once. Operations are those of the way that is taken.

    With `selected`, sums are cut to so many keys a token: a bound, since the sums don't say how contexts are distributed.
    """
    keys, pairs = shape.keys_read, shape.query_keys
    if selected is not None:
        most = selected.shape[1]
        keys, pairs = _smaller(keys, shape.requests * (most + max_query)), _smaller(pairs, shape.tokens * most)
    heads, width = q.shape[1], q.shape[2]
    rows, latent = kv_b.shape
    turned = width - nope
    if absorbed:
        operations = 2.0 * shape.tokens * rows * latent + 2.0 * pairs * heads * (2 * latent + turned)
    else:
        operations = 2.0 * keys * rows * latent + 2.0 * pairs * heads * (width + value_dim)
    row_bytes = (latent + turned) * latent_pages.element_size()
    per_token = heads * q.element_size()
    return Cost(
        {dtype_name(q.dtype): operations},
        read=shape.tokens * width * per_token + keys * row_bytes + nbytes(kv_b),
        written=shape.tokens * value_dim * per_token,
    )


def _smaller(a: float, b: float) -> float:
    """min, for numbers and numpy arrays alike."""
    return a + (b - a) * (b < a)


latent_attention = Op("latent_attention", body, abstract=abstract, cost=cost, mutates={"out": ""})
