"""Attention inside segments, in both directions: the patches of an image, the frames of a video."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.segment_attention import torch_sdpa
from firstlight.quant import dtype_name


def body(q: Tensor, k: Tensor, v: Tensor, segment_start: Tensor, *, scale: float, max_segment: int) -> Tensor:
    """out[t] = sum over the tokens j of t's segment of softmax_j(scale q[t] . k[j]) v[j], for each head.

    q, k, v [T, H, D], any strides; segment_start [S + 1] int32 or int64: segment s is tokens segment_start[s] ..
    segment_start[s + 1] - 1, possibly none; max_segment: a bound of its length.
    Returns [T, H, D] in q.dtype; tokens in no segment get zeros. Scores, softmax and sum are in float32 (float64 for
    float64 inputs), rounded once. Tolerance: 1e-5 of the largest |v| in float32; in lower precision probabilities may be
    rounded to q.dtype too. Source: transformers `Qwen3_5VisionAttention`.
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = segment_start.tolist()
    for begin, end in pairwise(starts):
        if begin < end:
            scores = torch.einsum("nhd,lhd->hnl", q[begin:end].to(kind), k[begin:end].to(kind)) * scale
            out[begin:end] = torch.einsum("hnl,lhd->nhd", scores.softmax(dim=-1), v[begin:end].to(kind))
    return out


def abstract(q: Tensor, k: Tensor, v: Tensor, segment_start: Tensor, *, scale: float, max_segment: int) -> Tensor:
    return q.new_empty(q.shape)


def cost(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, segment_start: Tensor, *, scale: float, max_segment: int
) -> Cost:
    """As if every segment were as long as the longest: the lengths are data."""
    tokens, heads, dim = q.shape
    multiplied = dtype_name(q.dtype)
    operations = 4.0 * tokens * max_segment * heads * dim
    return Cost({multiplied: operations}, read=q.nbytes + k.nbytes + v.nbytes, written=q.nbytes)


segment_attention = Op("segment_attention", body, abstract=abstract, cost=cost)
segment_attention.provide("torch_sdpa", torch_sdpa.run, workspace=torch_sdpa.workspace)
