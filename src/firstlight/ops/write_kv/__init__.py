"""Stores the keys and values of new tokens in the pages of their requests."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape


def body(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot: Tensor) -> None:
    """k_pages[slot[t] // S, slot[t] % S] = k[t]; the same for v. In place.

    k, v [T, KV, D]; k_pages, v_pages [P, S, KV, D], any strides but 1 for D; cast to the pages' dtype.
    slot [T] int32 or int64: page * S + offset. A slot < S lies in page 0, which is null: what it brings may be written
    there or dropped. Real slots of one call differ. Returns None. Exact: a copy.
    """
    size = k_pages.shape[1]
    flat = slot.long().clamp(min=0)
    where = (flat // size, flat % size)
    k_pages.index_put_(where, k.to(k_pages.dtype))
    v_pages.index_put_(where, v.to(v_pages.dtype))


def abstract(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot: Tensor) -> None:
    return None


def cost(shape: Shape, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot: Tensor) -> Cost:
    written = k.numel() * k_pages.element_size() + v.numel() * v_pages.element_size()
    return Cost(read=k.nbytes + v.nbytes + slot.nbytes, written=written)


write_kv = Op("write_kv", body, abstract=abstract, cost=cost, mutates={"k_pages": "slot", "v_pages": "slot"})
