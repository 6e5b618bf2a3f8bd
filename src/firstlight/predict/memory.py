"""What fits: bytes of weights on a rank, and the pages and slots that an engine makes of what they leave."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.cache.spec import page_bytes, slot_bytes
from firstlight.hardware import Hardware
from firstlight.models import CausalModel
from firstlight.nn.module import Module, caches
from firstlight.scheduling.arena import CacheGeometry, split_arena

CONTEXT_BYTES = 600 << 20
"""What a process holds on a GPU before it loads anything: the driver's context, libraries' kernels and workspaces."""


@dataclass(frozen=True, slots=True)
class Memory:
    """weights: bytes on one rank. cache: bytes for pages and slots. geometry: how they are split, or None: nothing fits."""

    weights: int
    cache: int
    geometry: CacheGeometry | None

    def requests(self, context: int) -> int:
        """How many requests of `context` tokens run at a time."""
        if self.geometry is None:
            return 0
        by_pages = self.geometry.pages // -(-context // self.geometry.page_size)
        live = self.geometry.slots - self.geometry.checkpoint_slots
        return min(by_pages, live) if self.geometry.has_state else by_pages


def weight_bytes(model: CausalModel) -> int:
    """Bytes of all weights that a rank holds; a tied head counts once."""
    return sum(
        getattr(module, attribute).nbytes
        for module in model.modules()
        if isinstance(module, Module)
        for attribute in module.weight_specs
    )


def memory_of(
    model: CausalModel,
    hardware: Hardware,
    *,
    cache_bytes: int = 0,
    planned: int = 0,
    page_size: int = 64,
    max_running: int = 256,
    max_context: int = 0,
    checkpoint_bytes: int | None = None,
) -> Memory:
    """The pools of a rank, split by the very function that an engine splits them with.

    cache_bytes: as given to the engine; 0: what the GPU has left. planned: what the engine keeps for steps (see
    `models.activations.planned_bytes`), with the scratch memory of the bound providers. max_context, checkpoint_bytes: see `split_arena`.
    """
    weights = weight_bytes(model)
    total = cache_bytes or hardware.memory - CONTEXT_BYTES - weights - planned
    specs = list(caches(model).values())
    try:
        geometry = split_arena(
            max(total, 0),
            page_size=page_size,
            page_bytes=page_bytes(specs, page_size),
            slot_bytes=slot_bytes(specs),
            max_running=max_running,
            max_context=max_context,
            checkpoint_bytes=checkpoint_bytes,
        )
    except ValueError:
        geometry = None
    return Memory(weights, max(total, 0), geometry)
