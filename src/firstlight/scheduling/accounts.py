"""Who holds which row, page or slot: reference counts over a pool's indices.

Index 0 of a pool belongs to nobody and is never given out. An index is free at count 0. A request that uses it holds
one count, and so does the prefix tree while it keeps it; an index that only the tree holds is *idle*: nobody would miss
it but a later request, so it can be evicted.
"""

from __future__ import annotations

import numpy as np


class IntegrityError(Exception):
    """An account doesn't add up: a bug of ours, found at a quiet moment."""


class Account:
    """Reference counts of indices 1..total of a pool.

    name: what it counts, for messages. `free` and `idle` are counts; `free + idle` can be had without preemption.
    """

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.free = total
        self.idle = 0
        self._counts = np.zeros(total + 1, np.int32)
        self._count = memoryview(self._counts)  # type: ignore[arg-type]  # the same memory: quicker for one index
        self._kept = np.zeros(total + 1, bool)  # held by the tree
        self._stack = np.arange(total, 0, -1, dtype=np.int32)  # [:free] are free; the top is given out next

    def allocate(self, count: int) -> list[int]:
        """`count` free indices, each with one reference. Raises IntegrityError if fewer are free: ask `free` first."""
        if count > self.free:
            raise IntegrityError(f"{count} {self.name} asked for, {self.free} of {self.total} free")
        taken = self._stack[self.free - count : self.free][::-1]
        self.free -= count
        self._counts[taken] = 1
        indices: list[int] = taken.tolist()
        return indices

    def share(self, indices: list[int]) -> None:
        """One more reference to each index; all are held already, and none is named twice."""
        if not indices:
            return
        chosen = np.asarray(indices, np.int32)
        self._counts[chosen] += 1
        self.idle -= int(np.count_nonzero(self._kept[chosen] & (self._counts[chosen] == 2)))

    def release(self, indices: list[int]) -> None:
        """One reference less to each index; those without any are free again. None is named twice."""
        if not indices:
            return
        chosen = np.asarray(indices, np.int32)
        self._counts[chosen] -= 1
        counts = self._counts[chosen]
        if (counts < 0).any():
            raise IntegrityError(
                f"{self.name} {chosen[counts < 0].tolist()} given back by somebody who doesn't hold them"
            )
        self.idle += int(np.count_nonzero(self._kept[chosen] & (counts == 1)))
        freed = chosen[counts == 0]
        self._stack[self.free : self.free + len(freed)] = freed
        self.free += len(freed)

    def keep(self, indices: list[int]) -> None:
        """The tree takes a reference of its own to indices that somebody holds."""
        self._counts[indices] += 1
        self._kept[indices] = True

    def forget(self, index: int) -> None:
        """The tree drops its reference."""
        self._kept[index] = False
        count = self._count[index] = self._count[index] - 1
        if not count:
            self.idle -= 1
            self._stack[self.free] = index
            self.free += 1

    def references(self, index: int) -> int:
        """How many hold this index."""
        return self._count[index]

    def would_free(self, indices: list[int]) -> int:
        """How many more could be had if each of these references were given back (an index may be named often)."""
        chosen, times = np.unique(np.asarray(indices, np.int32), return_counts=True)
        return int(np.count_nonzero(self._counts[chosen] - times == self._kept[chosen]))

    def check_integrity(self, idle_only: bool = False) -> None:
        """Raises IntegrityError, with the numbers, if the account doesn't add up.

        idle_only: nothing runs, so that whatever isn't free must be held by the tree alone.
        """
        held = int(np.count_nonzero(self._counts))
        if self.free + held != self.total:
            raise IntegrityError(f"{self.name}: {self.free} free + {held} held != {self.total}")
        free = self._stack[: self.free]
        if len(np.unique(free)) != self.free or self._counts[free].any() or self._counts[0] or (free < 1).any():
            raise IntegrityError(f"{self.name}: the free list names {free.tolist()}, not each once and unheld")
        idle = int(np.count_nonzero(self._kept & (self._counts == 1)))
        if idle != self.idle:
            raise IntegrityError(f"{self.name}: {self.idle} counted as idle, {idle} are")
        if idle_only and idle != held:
            leaked = np.flatnonzero((self._counts > 0) & ~(self._kept & (self._counts == 1))).tolist()
            raise IntegrityError(
                f"{self.name}: nothing runs, yet {leaked} are held ({idle} by the tree, {held} in all)"
            )
