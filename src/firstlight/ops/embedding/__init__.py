"""Token embeddings: rows of a table, of which this rank may hold a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.embedding import triton_rows
from firstlight.ops.op import Cost, Op, Shape
from firstlight.quant import PLAIN, Packed, Weight, unpack
from firstlight.quant.gguf_blocks import GGML_TYPES


def body(ids: Tensor, weight: Weight, *, start: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """out[t] = weight[ids[t] - start], or zeros where the id is not in [start, start + V).

    ids [T] int32 or int64; weight [V, H], plain or Packed: the rows [start, start + V) of the vocabulary. The ranks of a
    vocabulary shard each look up the ids that they hold, and the sum over ranks is the embedding.
    dtype: of the result; the weight's own if None. A Packed weight has none: TypeError if it isn't given then.
    Returns [T, H]. Exact: a copy (and the weight's own unpacking, rounded once).
    """
    kind = _result_dtype(weight, dtype)
    local = ids.long() - start
    held = (local >= 0) & (local < weight.shape[0])
    rows = _rows(weight, torch.where(held, local, 0), kind)
    return torch.where(held[:, None], rows, rows.new_zeros(()))


def _rows(weight: Weight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.index_select(0, rows).to(dtype)
    if weight.format.layout == PLAIN and weight.format.dtype in GGML_TYPES:  # blocks lie along a row: rows stand alone
        picked = Packed({"data": weight.parts["data"][rows]}, weight.format, (rows.shape[0], weight.shape[1]))
        return unpack(picked, dtype)
    return unpack(weight, dtype).index_select(0, rows)


def _result_dtype(weight: Weight, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    if isinstance(weight, Packed):
        raise TypeError(f"embedding of a {weight.format} weight needs dtype=, the dtype of the result")
    return weight.dtype


def abstract(ids: Tensor, weight: Weight, *, start: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    return ids.new_empty((ids.shape[0], weight.shape[1]), dtype=_result_dtype(weight, dtype))


def cost(shape: Shape, ids: Tensor, weight: Weight, *, start: int = 0, dtype: torch.dtype | None = None) -> Cost:
    """The rows that are looked up, not the table."""
    out = abstract(ids, weight, dtype=dtype)
    row_bytes = weight.nbytes / weight.shape[0]
    return Cost(read=ids.nbytes + ids.shape[0] * row_bytes, written=out.nbytes)


embedding = Op("embedding", body, abstract=abstract, cost=cost)
embedding.provide("triton_rows", triton_rows.run, when=triton_rows.when, rank=2)
