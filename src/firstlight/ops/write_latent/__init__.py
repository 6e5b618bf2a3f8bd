"""Puts the latent rows of new tokens in their places in the cache."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape


def body(latent: Tensor, rope: Tensor, latent_pages: Tensor, slot: Tensor) -> None:
    """latent_pages.view(rows)[slot[t]] = latent[t] | rope[t].

    latent [T, L]; rope [T, R]; latent_pages [P, S, 1, L + R], written in place; slot [T] int64: page * S + offset. Tokens with
    slot < S (page 0, the null page) write there or nowhere. Exact: a copy (cast to the pages' dtype).
    """
    page, offset = slot // latent_pages.shape[1], slot % latent_pages.shape[1]
    width = latent.shape[1]
    latent_pages[page, offset, 0, :width] = latent.to(latent_pages.dtype)
    latent_pages[page, offset, 0, width:] = rope.to(latent_pages.dtype)


def abstract(latent: Tensor, rope: Tensor, latent_pages: Tensor, slot: Tensor) -> None:
    return None


def cost(shape: Shape, latent: Tensor, rope: Tensor, latent_pages: Tensor, slot: Tensor) -> Cost:
    """Each row once in and once out."""
    written = (latent.numel() + rope.numel()) * latent_pages.element_size()
    return Cost(read=latent.nbytes + rope.nbytes + slot.nbytes, written=written)


write_latent = Op("write_latent", body, abstract=abstract, cost=cost, mutates={"latent_pages": "slot"})
