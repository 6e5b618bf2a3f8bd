"""Picks rows: the tokens whose logits are wanted."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.gather_rows import triton_rows
from firstlight.ops.op import Cost, Op, Shape


def body(x: Tensor, rows: Tensor) -> Tensor:
    """out[n] = x[rows[n]].

    x [T, H]; rows [N] int32 or int64 in [0, T), or negative: padding, whose result is unspecified. Returns [N, H] in
    x.dtype, contiguous. Exact: a copy.
    """
    return x.index_select(0, rows.clamp(min=0))


def abstract(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], x.shape[1]))


def cost(shape: Shape, x: Tensor, rows: Tensor) -> Cost:
    """The picked rows, read and written."""
    picked = rows.shape[0] * x.shape[1] * x.element_size()
    return Cost(read=picked + rows.nbytes, written=picked)


gather_rows = Op("gather_rows", body, abstract=abstract, cost=cost)
gather_rows.provide("triton_rows", triton_rows.run, when=triton_rows.when, rank=2)
