"""Carries a step's outcome into the table of running requests, where the next step finds it."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.advance_rows import triton_fused
from firstlight.ops.op import Cost, Op, Shape


def body(length: Tensor, last_token: Tensor, rows: Tensor, new_length: Tensor, sampling: Tensor, drawn: Tensor) -> None:
    """length[rows] = new_length; last_token[rows[sampling]] = drawn. In place.

    length, last_token [n] int64: the table. rows [R] int32, <= 0 is padding and writes nothing; real rows differ.
    new_length [R] int32. sampling [S] int64: which of the rows drew a token; drawn [S] int64. Returns None. Exact.
    """
    real = rows > 0
    row = rows.long().clamp(min=0)
    length.index_copy_(0, row, torch.where(real, new_length.long(), length[row]))
    drew = row[sampling]
    last_token.index_copy_(0, drew, torch.where(real[sampling], drawn, last_token[drew]))


def abstract(
    length: Tensor, last_token: Tensor, rows: Tensor, new_length: Tensor, sampling: Tensor, drawn: Tensor
) -> None:
    return None


def cost(
    shape: Shape,
    length: Tensor,
    last_token: Tensor,
    rows: Tensor,
    new_length: Tensor,
    sampling: Tensor,
    drawn: Tensor,
) -> Cost:
    return Cost(
        read=rows.nbytes + new_length.nbytes + sampling.nbytes + drawn.nbytes,
        written=8 * (rows.shape[0] + sampling.shape[0]),
    )


advance_rows = Op("advance_rows", body, abstract=abstract, cost=cost, mutates={"length": "rows", "last_token": "rows"})
advance_rows.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2)
