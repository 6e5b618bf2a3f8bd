"""The scheduler: from requests to plans, from results to tokens.

Its user (an engine, a test, a simulation) calls `plan()` until it returns None, hands each plan to an executor, and
calls `commit()` with the results in the order of the plans. Everything it decides follows from those calls, so that the
same calls give the same plans.

Who goes first: rows that decode; then prefill, first come first served within a class, online before offline, but for
the share that offline work keeps (`fairness.py`). What a request needs is found, in this order, among what is free, by
evicting from the prefix tree, by preempting: offline work for an online request that waits, the newest for a running
request that has outgrown its pages. Preempted requests keep their place in the queue.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from firstlight.config import EngineOptions
from firstlight.scheduling.accounts import Account
from firstlight.scheduling.admission import Admission
from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.draft import Draft
from firstlight.scheduling.errors import RequestRefusedError
from firstlight.scheduling.exports import plan_exports
from firstlight.scheduling.fairness import OfflineShare
from firstlight.scheduling.metrics import Metrics
from firstlight.scheduling.plan import StepPlan, StepResult
from firstlight.scheduling.preemption import Preemption
from firstlight.scheduling.prefix_keys import KeyChain
from firstlight.scheduling.progress import NEVER, Phase, Progress, TokenEvent
from firstlight.scheduling.queues import Queues
from firstlight.scheduling.request import Request
from firstlight.scheduling.residency import Residency
from firstlight.scheduling.rows import RowTable
from firstlight.scheduling.sampling import FinishReason, ServiceClass


@dataclass(slots=True, eq=False)
class Flight:
    """A plan whose result has not come: who decodes in it, and who prefills up to where."""

    plan: StepPlan
    decoding: list[Progress]
    prefilling: list[tuple[Progress, int]]


class Scheduler:
    """Plans steps for one engine.

    options: `max_running`, `step_tokens`, `offline_step_tokens`, `offline_share`, `prefix_cache` and `depth` count; a
        depth of 0 is 2 here, where no device is known.
    geometry: of the caches; its page size is the one that holds.
    max_context: tokens of the longest request, prompt and answer.
    drafts: tokens that speculation adds to each decode row, so that a commit brings up to drafts + 1 of them.
    Raises ValueError if a step has no room for even one row.
    """

    def __init__(
        self,
        options: EngineOptions,
        geometry: CacheGeometry,
        max_context: int,
        drafts: int = 0,
    ) -> None:
        self.options = options
        self.geometry = geometry
        self.max_context = max_context
        self.metrics = Metrics()
        self.depth = options.depth or 2
        self._width = 1 + drafts
        rows = min(options.max_running, options.step_tokens // self._width)
        if rows < 1:
            raise ValueError(f"step_tokens {options.step_tokens} must be at least 1 + drafts = {self._width}")
        self._rows = RowTable(rows)
        self._residency = Residency(geometry, self._rows, options.prefix_cache, self.metrics, self._retired)
        self._share = OfflineShare(options.offline_share, options.step_tokens)
        self._queues = Queues()
        self._preemption = Preemption(self._rows, self._residency, self._queues, self._share, self._width)
        self._admission = Admission(
            options,
            self._rows,
            self._residency,
            self._queues,
            self._share,
            self._preemption,
            self.metrics,
        )
        self._requests: dict[str, Progress] = {}
        self._flights: deque[Flight] = deque()
        self._number = 0
        self._arrivals = 0

    # Requests come and go

    def submit(self, request: Request) -> None:
        """Puts a request in the queue of its class. Raises RequestRefusedError, saying why, if it can never be served."""
        self._check(request)
        limit = self.max_context - len(request.prompt)
        progress = Progress(
            request,
            self._arrivals,
            min(request.sampling.max_tokens, limit),
            frozenset(request.sampling.stop_token_ids),
            KeyChain(request.identity, self.geometry.page_size),
        )
        if self.options.prefix_cache:
            progress.chain.extend(request.prompt)
        self._arrivals += 1
        self._requests[request.id] = progress
        self._queues.wait(progress)

    def abort(self, request_id: str) -> bool:
        """Ends a request: it is in no further plan, and no further event names it. False if it isn't held (any more)."""
        progress = self._requests.get(request_id)
        if progress is None:
            return False
        if progress.phase is Phase.WAITING:
            self._queues.stop_waiting(progress)
        self._end(progress)
        return True

    def _check(self, request: Request) -> None:
        length, new = len(request.prompt), request.sampling.max_tokens
        if request.id in self._requests:
            raise RequestRefusedError(409, f"request id {request.id!r} is in use by an unfinished request")
        if not length:
            raise RequestRefusedError(400, "the prompt is empty; it must have at least one token")
        if new < 1:
            raise RequestRefusedError(400, f"max_tokens is {new}; it must be at least 1")
        if length >= self.max_context:
            raise RequestRefusedError(
                400,
                f"the prompt has {length} tokens; with at least one token of answer it must fit {self.max_context} tokens",
            )
        longest = min(length + new, self.max_context) - 1 + self.depth * (self._width - 1)
        pages = -(-longest // self.geometry.page_size)
        if pages > self.geometry.pages:
            room = self.geometry.pages * self.geometry.page_size
            raise RequestRefusedError(
                400,
                f"prompt and answer may take {longest} tokens of cache, and all of it has room for {room}; "
                f"shorten the prompt ({length}) or max_tokens ({new})",
            )

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step's plan; None if there is nothing to do, or `depth` plans are in flight."""
        if len(self._flights) >= self.depth:
            return None
        draft = Draft(self._number)
        stalled = self._preemption.grow(draft)
        decoding = len(self._rows.decode_batch(stalled)[0])
        self._admission.plan(draft, self.options.step_tokens - decoding * self._width)
        batch = self._rows.decode_batch(stalled)  # smaller than before if the prefill has preempted
        if not len(batch[0]) and not draft.granted:
            return None
        if self.geometry.has_state and self.options.prefix_cache:
            plan_exports(draft, self._residency.publisher)
        context = self._rows.plan_decode(batch[0], self._width, draft.number)
        leaves, self._rows.leaving = self._rows.leaving, []
        plan = draft.finish(leaves, batch, self._width - 1, context)
        self._count(draft, batch[2])
        self._take_off(plan, draft, batch[2])
        return plan

    def _take_off(self, plan: StepPlan, draft: Draft, decoding: list[Progress]) -> None:
        chunks = []
        for progress, count in draft.granted.items():
            progress.planned += count
            progress.last_plan = plan.number
            chunks.append((progress, progress.planned))
            if progress.planned == progress.target:
                progress.phase = Phase.DECODE
                self._queues.stop_prefill(progress)
                self._rows.start_decoding(progress, progress.max_new - len(progress.output) - 1)
        self._flights.append(Flight(plan, decoding, chunks))
        self._residency.oldest_in_flight = self._flights[0].plan.number
        self._number += 1

    def _count(self, draft: Draft, decoding: list[Progress]) -> None:
        prefilled = sum(draft.granted.values())
        decoded = len(decoding) * self._width
        self.metrics.prefilled_tokens += prefilled
        offline = sum(count for progress, count in draft.granted.items() if not progress.online)
        if self._rows.offline:
            offline += self._width * sum(not progress.online for progress in decoding)
        if offline or self._queues.waiting[ServiceClass.OFFLINE]:
            self._share.settle(prefilled + decoded - offline, offline)

    def _retired(self, progress: Progress) -> None:
        if progress.phase is not Phase.ENDED:
            self._queues.wait(progress)

    # Results

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Takes in what came of the oldest plan in flight; returns the news, in the order of its sampling rows.

        Raises ValueError if the plan is not the oldest in flight, or the result doesn't have a row for each of its
        sampling rows.
        """
        flight = self._check_result(plan, result)
        self._flights.popleft()
        self._residency.oldest_in_flight = self._flights[0].plan.number if self._flights else NEVER
        for progress, end in flight.prefilling:
            progress.computed = end
            self._residency.unpin_source(progress)
            self._residency.insert(progress)
        events: list[TokenEvent] = []
        tokens, counts = result.tokens.tolist(), result.counts.tolist()
        width = self._width
        for progress, new, count in zip(flight.decoding, tokens, counts, strict=False):
            if count != width:
                self._rows.correct(progress, width, count)
            progress.computed += count
            self._take(progress, new if len(new) == count else new[:count], events)
        finals = [progress for progress, end in flight.prefilling if end == progress.target]
        for progress, new in zip(finals, tokens[len(flight.decoding) :], strict=True):
            self._take(progress, new[:1], events)
        self._residency.retire_drained(plan.number)
        return events

    def _check_result(self, plan: StepPlan, result: StepResult) -> Flight:
        if not self._flights or self._flights[0].plan is not plan:
            oldest = self._flights[0].plan.number if self._flights else None
            raise ValueError(f"plan {plan.number} was committed, but the oldest in flight is {oldest}")
        flight = self._flights[0]
        finals = sum(chunk.final for chunk in plan.prefill)
        expected = len(flight.decoding) + finals
        if len(result.tokens) != expected or len(result.counts) != expected:
            raise ValueError(
                f"plan {plan.number} samples {expected} rows; the result has {len(result.tokens)} rows of tokens "
                f"and {len(result.counts)} counts"
            )
        highest = min(self._width, result.tokens.shape[1])
        if expected and (result.counts.min() < 0 or result.counts.max() > highest):
            raise ValueError(f"counts {result.counts.tolist()} must be 0 to {highest}")
        if (result.counts[len(flight.decoding) :] != 1).any():
            raise ValueError(f"a final chunk commits 1 token, not {result.counts[len(flight.decoding) :].tolist()}")
        return flight

    def _take(self, progress: Progress, new: list[int], events: list[TokenEvent]) -> None:
        """New tokens of a request, as far as they belong to its answer."""
        if not new:
            return
        progress.output += new
        if progress.phase is Phase.ENDED:
            return
        cached = None if progress.answer else progress.cached_tokens
        finish = None
        for index, token in enumerate(new, 1):
            if token in progress.stops:
                finish = FinishReason.STOP
            elif progress.answer + index >= progress.max_new:
                finish = FinishReason.LENGTH
            if finish is not None:
                new = new[:index]
                break
        progress.answer += len(new)
        events.append(TokenEvent(progress.request.id, new, finish, cached))
        if progress.computed >= progress.insert_at:
            self._residency.insert(progress)
        if finish is not None:
            self._end(progress)

    def _end(self, progress: Progress) -> None:
        if progress.phase is Phase.PREFILL and not progress.draining:
            self._queues.stop_prefill(progress)
        running = progress.phase is not Phase.WAITING and not progress.draining
        progress.phase = Phase.ENDED
        del self._requests[progress.request.id]
        if running:
            self._residency.leave(progress)

    # Looking in

    @property
    def running(self) -> int:
        """Requests with a row."""
        return self._rows.account.total - self._rows.account.free

    @property
    def waiting(self) -> int:
        """Requests in the queues."""
        return sum(map(len, self._queues.waiting.values()))

    def by_class(self) -> tuple[dict[ServiceClass, int], dict[ServiceClass, int]]:
        """How many requests of each class run, and how many wait."""
        waiting = {service: len(queue) for service, queue in self._queues.waiting.items()}
        held = Counter(progress.request.service for progress in self._requests.values())
        return {service: held[service] - waiting[service] for service in ServiceClass}, waiting

    @property
    def pages(self) -> Account:
        """The account of pages."""
        return self._residency.pages

    @property
    def slots(self) -> Account:
        """The account of state slots."""
        return self._residency.slots

    @property
    def unfinished(self) -> int:
        """Requests that will bring further events."""
        return len(self._requests)

    @property
    def in_flight(self) -> int:
        """Plans whose results have not been committed."""
        return len(self._flights)

    def clear_cache(self) -> None:
        """Evicts from the prefix tree all that no request uses."""
        self._residency.tree.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError, with the numbers, if rows, pages or slots don't add up, or, when nothing runs, if any
        of them is held by somebody other than the prefix tree."""
        self._residency.tree.check_integrity()
        idle = not self._requests and not self._flights
        for account in (self._rows.account, self._residency.pages, self._residency.slots):
            account.check_integrity(idle_only=idle)
