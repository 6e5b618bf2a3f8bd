"""The prefill of a step: who goes on with it, and who may begin."""

from __future__ import annotations

from firstlight.config import EngineOptions
from firstlight.scheduling.draft import Draft
from firstlight.scheduling.exports import wish, worth_waiting
from firstlight.scheduling.fairness import OfflineShare
from firstlight.scheduling.metrics import Metrics
from firstlight.scheduling.plan import CHUNK
from firstlight.scheduling.preemption import Preemption
from firstlight.scheduling.prefix_nodes import Hit
from firstlight.scheduling.progress import Progress
from firstlight.scheduling.queues import Queues
from firstlight.scheduling.residency import Residency
from firstlight.scheduling.rows import RowTable
from firstlight.scheduling.sampling import ServiceClass
from firstlight.scheduling.work import Work

SCAN = 64  # waiting requests looked at in a step, past those that wait for a running prefill


class Admission:
    """Deals out the tokens that decode leaves of a step, in the order that the classes and their queues give."""

    def __init__(
        self,
        options: EngineOptions,
        rows: RowTable,
        residency: Residency,
        queues: Queues,
        share: OfflineShare,
        preemption: Preemption,
        metrics: Metrics,
    ) -> None:
        self._options = options
        self._rows = rows
        self._residency = residency
        self._queues = queues
        self._share = share
        self._preemption = preemption
        self._metrics = metrics
        self._chunk_multiple = CHUNK if residency.geometry.has_state else 1
        self._work = Work(residency.geometry, options.step_tokens)

    def plan(self, draft: Draft, budget: int) -> None:
        """Plans up to `budget` tokens of prefill; fewer deep in a context, if online rows decode meanwhile."""
        online, offline = ServiceClass.ONLINE, ServiceClass.OFFLINE
        self._work.begin(bounded=self._rows.online_decoding > 0)
        ahead = 0
        if self._queues.waiting[online] or self._rows.online:
            ahead = min(self._share.tokens_ahead, self._options.offline_step_tokens, budget)
        if self._queues.waiting[online] or self._queues.prefilling[online]:
            ahead = min(ahead, max(budget // 2, 1 if self._share.overdue else 0))
        used_ahead, blocked = self._prefill(draft, offline, ahead, ahead=True)
        pause = blocked and self._share.overdue
        used, blocked = self._prefill(draft, online, budget - used_ahead, pause=pause)
        rest = min(budget - used_ahead - used, self._options.offline_step_tokens - used_ahead)
        self._prefill(draft, offline, rest, pause=blocked or pause)

    def _prefill(
        self, draft: Draft, service: ServiceClass, budget: int, ahead: bool = False, pause: bool = False
    ) -> tuple[int, bool]:
        """Grants up to `budget` tokens to requests of a class; returns how many, and whether one of them waits for
        rows, pages or slots.

        ahead: offline work that goes before online work. pause: admit nobody.
        """
        used = 0
        for progress in self._queues.prefilling[service]:
            if used >= budget or self._work.is_done:
                break
            progress.protected |= ahead
            used += self._grant(draft, progress, budget - used)
        queue, position = self._queues.waiting[service], 0
        while not pause and used < budget and not self._work.is_done and position < min(len(queue), SCAN):
            progress = queue[position]
            if progress.awaited is not None and progress.awaited in self._residency.publisher.pending:
                position += 1
                continue
            victims = self._preemption.preemptable() if service is ServiceClass.ONLINE else []
            if not self._rows.account.free and not victims:
                return used, True
            hit = self._residency.look_up(progress)
            progress.awaited = worth_waiting(progress, hit, self._residency.publisher)
            if progress.awaited is not None:
                self._metrics.waited_for_prefix += 1
                position += 1
                continue
            if not self._admit(progress, hit, victims, draft):
                return used, True
            del queue[position]
            progress.protected = ahead
            used += self._grant(draft, progress, budget - used)
        return used, False

    def _grant(self, draft: Draft, progress: Progress, budget: int) -> int:
        start = progress.planned + draft.granted.get(progress, 0)
        wanted = min(budget, progress.target - start)
        count = draft.grant(progress, self._work.fitting(start, wanted), self._chunk_multiple)
        self._work.take(start, count)
        return count

    def _admit(self, progress: Progress, hit: Hit, victims: list[Progress], draft: Draft) -> bool:
        if not self._residency.admit(progress, hit, victims, self._preemption.preempt):
            return False
        self._queues.prefill(progress)
        if self._residency.geometry.has_state:
            wish(progress, hit)
        draft.join(progress)
        cached = progress.hit.length
        if progress.cached_tokens is None:
            progress.cached_tokens = cached
        self._metrics.looked_up_tokens += progress.known
        self._metrics.matched_tokens += cached
        self._metrics.lost_tokens += hit.matched - cached
        return True
