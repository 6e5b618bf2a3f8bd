"""Segment attention by torch's fused attention, a segment at a time.

Reads the segments' bounds on the host, so it can't be captured in a CUDA graph; a vision tower isn't.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.ops.op import Call


def workspace(call: Call) -> int:
    """The longest segment's keys and values side by side, and its answer: bytes."""
    q = call.args[0]
    return 4 * call.kwargs["max_segment"] * q.shape[1] * q.shape[2] * q.element_size()


def run(q: Tensor, k: Tensor, v: Tensor, segment_start: Tensor, *, scale: float, max_segment: int) -> Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = segment_start.tolist()
    for begin, end in pairwise(starts):
        if begin < end:
            queries, keys, values = (part[begin:end].transpose(0, 1)[None] for part in (q, k, v))  # [1, H, length, D]
            result = functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
            out[begin:end] = result[0].transpose(0, 1)
    return out
