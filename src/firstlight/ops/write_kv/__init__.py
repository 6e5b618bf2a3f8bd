"""Stores the keys and values of new tokens in the pages of their requests."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape

FP8 = torch.float8_e4m3fn
"""The one dtype of pages that holds less than activations do."""


def body(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot: Tensor) -> None:
    """k_pages[slot[t] // S, slot[t] % S] = k[t]; the same for v. In place.

    k, v [T, KV, D]; k_pages, v_pages [P, S, KV, D], any strides but 1 for D; `as_stored` in the pages' dtype.
    slot [T] int32 or int64: page * S + offset. A slot < S lies in page 0, which is null: what it brings may be written
    there or dropped. Real slots of one call differ. Returns None. Exact: a copy, or the nearest e4m3.
    """
    size = k_pages.shape[1]
    flat = slot.long().clamp(min=0)
    where = (flat // size, flat % size)
    for pool, rows in ((k_pages, k), (v_pages, v)):
        bits_of(pool).index_put_(where, bits_of(as_stored(rows, pool.dtype)))


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the dtype of pages. In FP8 the scale is 1: what is beyond +-448 becomes +-448, and NaN stays NaN."""
    if dtype == FP8:
        largest = torch.finfo(FP8).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def bits_of(pool: Tensor) -> Tensor:
    """The same memory for moving rows about: FP8 as integers, since torch doesn't index float8 everywhere."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def abstract(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot: Tensor) -> None:
    return None


def cost(shape: Shape, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot: Tensor) -> Cost:
    written = k.numel() * k_pages.element_size() + v.numel() * v_pages.element_size()
    return Cost(read=k.nbytes + v.nbytes + slot.nbytes, written=written)


write_kv = Op("write_kv", body, abstract=abstract, cost=cost, mutates={"k_pages": "slot", "v_pages": "slot"})
