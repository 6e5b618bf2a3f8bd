"""Whom to evict first: recency weighted by what it would cost to compute again (GreedyDual).

Each entry has a *credit*: the clock when it was last used plus its value, in FLOPs saved per byte held. The entry with
the least credit goes first, and the clock advances to that credit, so that what isn't used ages against what is.
With equal values this is exactly least recently used.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """credit: see above. ticket: the number of its newest place in the queue; older places are void."""

    credit: float
    ticket: int


Entry = TypeVar("Entry", bound=Evictable)


class EvictionQueue(Generic[Entry]):
    """A heap of entries that may be evicted; entries in use are left in it and skipped when their turn comes.

    can_evict: whether an entry may go now. One that may not is dropped from the queue and must be offered again when it
    is no longer in use.
    """

    def __init__(self, can_evict: Callable[[Entry], bool]) -> None:
        self.clock = 0.0
        self._can_evict = can_evict
        self._heap: list[tuple[float, int, Entry]] = []
        self._tickets = 0
        self._tidy_at = 1024

    def use(self, entry: Entry, value: float) -> None:
        """The entry was used now, and is worth `value`."""
        entry.credit = max(entry.credit, self.clock + value)

    def offer(self, entry: Entry) -> None:
        """The entry may be evicted from now on."""
        self._tickets += 1
        entry.ticket = self._tickets
        if len(self._heap) >= self._tidy_at:  # void places would pile up while memory is plentiful
            self._heap = [place for place in self._heap if place[1] == place[2].ticket and self._can_evict(place[2])]
            heapq.heapify(self._heap)
            self._tidy_at = 2 * len(self._heap) + 1024
        heapq.heappush(self._heap, (entry.credit, entry.ticket, entry))

    def take(self, below: float = math.inf) -> Entry | None:
        """Removes and returns the entry to evict first; None if there is none with a credit under `below`."""
        while self._heap:
            credit, ticket, entry = heapq.heappop(self._heap)
            if ticket == entry.ticket and self._can_evict(entry):
                if credit >= below:
                    heapq.heappush(self._heap, (credit, ticket, entry))
                    return None
                self.clock = max(self.clock, credit)
                return entry
        return None

    def take_at_once(self, entry: Entry) -> bool:
        """What `offer` and `take` would do if this entry is the first to go; else False, and nothing is done."""
        if (self._heap and self._heap[0][0] <= entry.credit) or not self._can_evict(entry):
            return False
        self.clock = max(self.clock, entry.credit)
        return True
