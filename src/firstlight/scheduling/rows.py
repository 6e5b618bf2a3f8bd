"""The scheduler's mirror of the executor's request table: which request has which row, and bounds on its length.

The bounds are numpy arrays over rows, so that planning the decode part of a step is a handful of vector operations,
however many requests run.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from firstlight.scheduling.accounts import Account
from firstlight.scheduling.progress import Progress

Batch = tuple[np.ndarray, np.ndarray, list[Progress]]


class RowTable:
    """Rows 1..total.

    bound[row]: no more than this many tokens are in its cache once all planned steps have run.
    capacity[row]: tokens its pages have room for.
    left[row]: decode steps that may still be planned; each commits at least one token, or gives its step back.
    last[row]: number of the last plan with this row among its decode rows.
    """

    def __init__(self, total: int) -> None:
        self.account = Account("rows", total)
        self.bound = np.zeros(total + 1, np.int64)
        self.capacity = np.zeros(total + 1, np.int64)
        self.left = np.zeros(total + 1, np.int64)
        self.last = np.full(total + 1, -1, np.int64)
        self.holders: list[Progress | None] = [None] * (total + 1)
        self.leaving: list[int] = []  # freed since the last plan
        self.offline = 0  # offline requests with a row
        self.online_decoding = 0  # online requests that decode
        self._decoding: dict[int, Progress] = {}  # by row, in the order in which they began
        self._batch: Batch | None = None

    @property
    def online(self) -> int:
        """Online requests with a row."""
        return self.account.total - self.account.free - self.offline

    def join(self, progress: Progress) -> None:
        """Gives the request a row; one must be free."""
        (row,) = self.account.allocate(1)
        progress.row = row
        self.holders[row] = progress
        self.last[row] = -1
        self.offline += not progress.online

    def start_decoding(self, progress: Progress, left: int) -> None:
        """Its prefill is planned to the end; from the next plan on it decodes, up to `left` steps."""
        row = progress.row
        self.bound[row] = progress.target
        self.left[row] = left
        self._decoding[row] = progress
        self.online_decoding += progress.online
        self._batch = None

    def stop_decoding(self, progress: Progress) -> None:
        """It is in no further plan."""
        if self._decoding.pop(progress.row, None) is not None:
            progress.last_plan = max(progress.last_plan, int(self.last[progress.row]))
            self.online_decoding -= progress.online
            self._batch = None

    def free(self, progress: Progress) -> None:
        """Takes the row back; the next plan tells the executor."""
        self.stop_decoding(progress)
        self.holders[progress.row] = None
        self.account.release([progress.row])
        self.leaving.append(progress.row)
        progress.row = 0
        self.offline -= not progress.online

    def decode_batch(self, stalled: Set[int] = frozenset()) -> Batch:
        """Rows [D] int32, their slots [D] int32 and requests, for every row that may decode now, `stalled` ones apart.

        The arrays are the same objects from call to call while nothing changes.
        """
        if self._batch is None:
            progresses = list(self._decoding.values())
            rows = np.fromiter(self._decoding, np.int32, len(progresses))
            slots = np.fromiter((progress.slot for progress in progresses), np.int32, len(progresses))
            self._batch = rows, slots, progresses
        rows, slots, progresses = self._batch
        allowed = self.left[rows] > 0
        if stalled:
            allowed &= ~np.isin(rows, list(stalled))
        if allowed.all():
            return self._batch
        chosen = np.flatnonzero(allowed)
        return rows[chosen], slots[chosen], [progresses[index] for index in chosen.tolist()]

    def needing_pages(self, width: int, page_size: int) -> list[tuple[Progress, int]]:
        """Requests whose next decode step of `width` tokens may write past their last page, oldest first, and how many
        more pages each needs."""
        rows, _, _ = self.decode_batch()
        lacking = self.bound[rows] + width - self.capacity[rows]
        chosen = np.flatnonzero(lacking > 0)
        if not len(chosen):
            return []
        counts = -(-lacking[chosen] // page_size)
        short = zip(rows[chosen].tolist(), counts.tolist(), strict=True)
        return sorted(((self._decoding[row], count) for row, count in short), key=lambda pair: pair[0].order)

    def plan_decode(self, rows: np.ndarray, width: int, number: int) -> int:
        """Notes a planned decode step; returns the longest context it may reach."""
        self.bound[rows] += width
        self.left[rows] -= 1
        self.last[rows] = number
        return int(self.bound[rows].max(initial=0))

    def correct(self, progress: Progress, width: int, count: int) -> None:
        """A decode step of `width` tokens has committed `count`: the bounds were planned for width, and left for 1."""
        if self._decoding.get(progress.row) is progress:
            self.bound[progress.row] -= width - count
            self.left[progress.row] -= count - 1
