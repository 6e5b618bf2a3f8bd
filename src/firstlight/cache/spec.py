"""What a module keeps between steps, as data: from it pools are allocated, sized and predicted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

SLOT_ALIGNMENT = 256
"""Bytes; every tensor of a slot starts at a multiple, so that any kernel may use its widest loads."""


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """Rows that grow with the context: K and V of a layer. `kv_heads` are those that this rank holds.

    names: what is kept for each token, each [kv_heads, head_dim]; latent attention keeps one row, from which both follow.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    group: str = "attention"
    names: tuple[str, ...] = ("k", "v")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, K and V together."""
        return len(self.names) * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """A state of fixed size for each sequence: named tensors, e.g. {"conv": ((C, 3), bf16), "state": ((HV, V, K), fp32)}."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    group: str = "state"

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each tensor in this layer's part of a slot."""
        offsets, offset = {}, 0
        for name, (shape, dtype) in self.tensors.items():
            offsets[name] = offset
            offset += -(-math.prod(shape) * dtype.itemsize // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        return offsets

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state in this layer, with alignment."""
        return sum(
            -(-math.prod(shape) * dtype.itemsize // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
            for shape, dtype in self.tensors.values()
        )


CacheSpec = PagedSpec | SlotSpec


def page_bytes(specs: Iterable[CacheSpec], page_size: int) -> int:
    """Bytes of one page: K and V of `page_size` tokens in all layers."""
    return sum(spec.token_bytes * page_size for spec in specs if isinstance(spec, PagedSpec))


def slot_bytes(specs: Iterable[CacheSpec]) -> int:
    """Bytes of one slot: the states of all layers."""
    return sum(spec.nbytes for spec in specs if isinstance(spec, SlotSpec))
