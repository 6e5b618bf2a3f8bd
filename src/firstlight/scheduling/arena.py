"""Splitting the cache's memory, once, at start: live state slots first, then checkpoints, pages in all that is left.

Pure arithmetic, so that a planner for hardware that isn't here gets the same split as a run there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What the scheduler must know of the caches.

    page_size: tokens in a page. pages: usable pages, without page 0.
    slots: usable state slots, without slot 0; 0 for a model without state.
    checkpoint_slots: how many of them may hold checkpoints at a time; at least one slot is left to a live request.
    page_bytes, slot_bytes: bytes of each, over all layers.
    token_flops: FLOPs of prefilling one token, attention left out; pair_flops: FLOPs of attention for one token and one
        token of its context. They weigh what an eviction would cost; only their ratio to each other matters.
    """

    page_size: int
    pages: int
    slots: int = 0
    checkpoint_slots: int = 0
    page_bytes: int = 1
    slot_bytes: int = 1
    token_flops: float = 1.0
    pair_flops: float = 0.0

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.pages < 1:
            raise ValueError(f"page_size {self.page_size} and pages {self.pages} must be at least 1")
        if not 0 <= self.checkpoint_slots <= max(self.slots - 1, 0):
            raise ValueError(
                f"checkpoint_slots {self.checkpoint_slots} must leave at least one of {self.slots} slots to a request"
            )

    @property
    def has_state(self) -> bool:
        """Whether requests have a recurrent state beside their pages."""
        return self.slots > 0

    def prefill_flops(self, start: int, end: int) -> float:
        """FLOPs of prefilling tokens [start, end)."""
        return (end - start) * self.token_flops + (end * end - start * start) / 2 * self.pair_flops


def split_arena(
    total_bytes: int,
    *,
    page_size: int,
    page_bytes: int,
    slot_bytes: int = 0,
    max_running: int,
    max_context: int = 0,
    checkpoint_bytes: int | None = None,
    token_flops: float = 1.0,
    pair_flops: float = 0.0,
) -> CacheGeometry:
    """The geometry that fits `total_bytes`, row 0 of each pool included.

    page_bytes: 0 for a model without attention over pages; it has to have state. slot_bytes: 0 for one without state.
    max_context: tokens of a request at most; counts where pages take no memory.
    max_running: live slots wanted. They take at most half of what checkpoints leave, so that pages are never squeezed
        out; with fewer live slots than `max_running`, fewer requests run at a time.
    checkpoint_bytes: at most this for checkpoints; None: half of the total.
    Raises ValueError, with the bytes that would be enough, if one request could not run.
    """
    slots = checkpoints = 0
    left = total_bytes
    if slot_bytes:
        budget = total_bytes // 2 if checkpoint_bytes is None else min(checkpoint_bytes, total_bytes)
        smallest = 2 * slot_bytes + 2 * page_bytes  # row 0 and one more of each
        checkpoints = max(min(budget, total_bytes - 2 * smallest) // slot_bytes, 0)
        left -= checkpoints * slot_bytes
        live = min(max_running, left // 2 // slot_bytes - 1)
        if live < 1:
            raise ValueError(
                f"{total_bytes:,} bytes of cache are too few: a state slot takes {slot_bytes:,}; give at least "
                f"{2 * smallest:,}"
            )
        slots = live + checkpoints
        left -= (live + 1) * slot_bytes
    # Without attention over pages these are mere numbers: enough for every slot's longest context.
    pages = left // page_bytes - 1 if page_bytes else slots * -(-max_context // page_size)
    if pages < 1:
        raise ValueError(
            f"{total_bytes:,} bytes of cache leave {max(left, 0):,} for pages of {page_bytes:,}; at least 2 pages are needed"
        )
    return CacheGeometry(page_size, pages, slots, checkpoints, page_bytes, slot_bytes or 1, token_flops, pair_flops)
