"""Who gives way when pages run out, or when an online request waits for what offline work holds."""

from __future__ import annotations

from firstlight.scheduling.draft import Draft
from firstlight.scheduling.fairness import OfflineShare
from firstlight.scheduling.progress import Phase, Progress
from firstlight.scheduling.queues import Queues
from firstlight.scheduling.residency import Residency
from firstlight.scheduling.rows import RowTable


class Preemption:
    """width: tokens of a decode step, drafts included."""

    def __init__(self, rows: RowTable, residency: Residency, queues: Queues, share: OfflineShare, width: int) -> None:
        self._rows = rows
        self._residency = residency
        self._queues = queues
        self._share = share
        self._width = width

    def grow(self, draft: Draft) -> set[int]:
        """Gives pages to rows that may outgrow theirs; returns the rows that sit this step out for want of them."""
        growing = self._rows.needing_pages(self._width, self._residency.geometry.page_size)
        stalled: set[int] = set()
        if not self._residency.room_for(sum(count for _, count in growing)):
            growing = [pair for pair in growing if self._make_room_to_grow(*pair, stalled)]
        else:
            self._residency.grow(growing)
        for progress, count in growing:
            if progress.row:  # not preempted since, for a newer online request
                draft.append_pages(progress, count)
        return stalled

    def _make_room_to_grow(self, progress: Progress, count: int, stalled: set[int]) -> bool:
        """Grows one request, if need be at the cost of newer ones; False if it doesn't grow in this step."""
        if progress.draining or progress.phase is not Phase.DECODE:
            return False  # preempted for the sake of an older one
        while not self._residency.room_for(count):
            if any(other.row for other in self._residency.draining):
                stalled.add(progress.row)  # pages come back soon, without preempting anybody
                return False
            victim = self._victim_for_growth(progress)
            self.preempt(victim)
            if victim is progress:
                return False
        self._residency.grow([(progress, count)])
        return True

    def _running(self) -> list[Progress]:
        """Requests in the batch, newest first."""
        holders = (holder for holder in self._rows.holders if holder is not None and not holder.draining)
        return sorted(holders, key=lambda progress: -progress.order)

    def preemptable(self) -> list[Progress]:
        """Offline requests that give way to an online one, newest first."""
        if not self._rows.offline:
            return []
        return [other for other in self._running() if not other.online and not self._is_protected(other)]

    def _is_protected(self, progress: Progress) -> bool:
        return progress.protected and not (self._share.overspent and self._has_paid_off(progress))

    @staticmethod
    def _has_paid_off(progress: Progress) -> bool:
        """Whether it has given as many tokens as it had prefilled, so that no more than half of its work is lost."""
        return len(progress.output) - progress.joined_with >= max(progress.target - progress.hit.length, 1)

    def _victim_for_growth(self, progress: Progress) -> Progress:
        running = self._running()
        newer = [other for other in running if other.online == progress.online and other.order > progress.order]
        if not progress.online:
            return min(newer, key=self._is_protected, default=progress)
        protected = [other for other in running if other.protected and self._has_paid_off(other)]
        return next(iter(self.preemptable() + newer + protected), progress)

    def preempt(self, progress: Progress) -> None:
        """Takes a request out of the batch and back to waiting."""
        if progress.phase is Phase.PREFILL:
            self._queues.stop_prefill(progress)
        self._residency.preempt(progress)
