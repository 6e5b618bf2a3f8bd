"""The memory behind the caches of a model on one device.

Pools are block-major: a page holds K and V of all layers, `[pages, layers, 2, page_size, kv_heads, head_dim]`, and a slot the
states of all layers, so that either is one contiguous run and a copy, an offload or a transfer takes one descriptor. To
kernels it is a stride.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from firstlight.cache.spec import CacheSpec, PagedSpec, page_bytes, slot_bytes


class CachePool:
    """Pages and slots for the given modules. Page 0 and slot 0 are the null ones, counted in the totals."""

    def __init__(
        self, specs: Mapping[str, CacheSpec], *, pages: int, slots: int, page_size: int, device: torch.device | str
    ) -> None:
        """specs: by module path. pages, slots: how many, with the null one.

        Raises ValueError if paged modules of one group disagree in dtype or shape.
        """
        self.specs = dict(specs)
        self.pages, self.slots, self.page_size = pages, slots, page_size
        paged = [spec for spec in specs.values() if isinstance(spec, PagedSpec)]
        if len(set(paged)) > len({spec.group for spec in paged}):
            raise ValueError(
                f"layers of one group must have the same KV shape and dtype; these differ: {sorted(map(str, set(paged)))}"
            )
        self.page_bytes = page_bytes(paged, page_size)
        self.slot_bytes = slot_bytes(specs.values())
        self.page_memory = torch.zeros((pages, self.page_bytes), dtype=torch.uint8, device=device)
        self.slot_memory = torch.zeros((slots, self.slot_bytes), dtype=torch.uint8, device=device)
        self.views = self._views()

    def _views(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of each module: {"k", "v"} (or as the spec names them):
        [pages, page_size, kv_heads, head_dim], or its slot tensors [slots, ...]."""
        views: dict[str, dict[str, torch.Tensor]] = {}
        page_offset = slot_offset = 0
        for path, spec in self.specs.items():
            if isinstance(spec, PagedSpec):
                part = spec.token_bytes * self.page_size // len(spec.names)
                shape = (self.page_size, spec.kv_heads, spec.head_dim)
                views[path] = {
                    name: _rows(self.page_memory, page_offset + part * i, shape, spec.dtype)
                    for i, name in enumerate(spec.names)
                }
                page_offset += len(spec.names) * part
            else:
                offsets = spec.offsets
                views[path] = {
                    name: _rows(self.slot_memory, slot_offset + offsets[name], shape, dtype)
                    for name, (shape, dtype) in spec.tensors.items()
                }
                slot_offset += spec.nbytes
        return views

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages of all layers; [n] int64 numbers on the device. All reads come before all writes."""
        _copy(self.page_memory, source, target)

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole slots of all layers; [n] int64 numbers on the device. All reads come before all writes."""
        _copy(self.slot_memory, source, target)

    def poison(self, pages: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Fill pages and slots with NaN (bytes of ones are NaN in every float format), to show up reads of what is free."""
        if len(pages):
            self.page_memory[torch.as_tensor(pages, dtype=torch.long)] = 0xFF
        if len(slots):
            self.slot_memory[torch.as_tensor(slots, dtype=torch.long)] = 0xFF


def _rows(memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[rows, *shape] of `dtype` at a byte offset in each row of [rows, bytes] memory: a view."""
    rows, _row_bytes = memory.shape
    size = torch.Size(shape).numel()
    return (
        memory[:, offset : offset + size * dtype.itemsize].view(dtype).unflatten(1, shape)
        if rows
        else memory.view(dtype)
    )


def _copy(memory: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    memory.index_copy_(0, target, memory.index_select(0, source))
