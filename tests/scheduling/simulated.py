"""A fake executor whose caches hold hashes of token histories, and a driver that runs a scheduler on it.

The value that position t of a page holds is the hash of tokens [0, t]; a slot holds the hash of the tokens it has seen.
So a wrong page, slot or copy, a write to something shared, or a page freed too early shows as a wrong hash where it is
read. The next token is a function of the hash read from the cache, so outputs depend on it too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np

from firstlight.config import EngineOptions
from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.plan import CHUNK, MoveKind, StepPlan, StepResult
from firstlight.scheduling.progress import TokenEvent
from firstlight.scheduling.request import CacheIdentity, Request
from firstlight.scheduling.sampling import FinishReason, SamplingParams, ServiceClass
from firstlight.scheduling.scheduler import Scheduler

EMPTY = 7
POISON = -1
VOCABULARY = 6


def extend(history: int, tokens: list[int], salt: int = 0) -> int:
    """The hash of a history after more tokens."""
    for token in tokens:
        history = hash((history, token, salt)) & 0x7FFFFFFFFFFFFFFF
    return history


def next_token(history: int) -> int:
    """The model: the token after a history."""
    return (history >> 7) % VOCABULARY


def generate(prompt: list[int], max_tokens: int, stops: tuple[int, ...], salt: int = 0) -> list[int]:
    """The answer that a model without any cache gives."""
    history, answer = extend(EMPTY, prompt, salt), []
    while len(answer) < max_tokens and not (answer and answer[-1] in stops):
        answer.append(next_token(history))
        history = extend(history, answer[-1:], salt)
    return answer


@dataclass
class Row:
    """One row of the request table. tokens: all that it should have in its cache, and the newest, not yet run."""

    tokens: list[int]
    length: int
    salt: int
    stops: tuple[int, ...]
    pages: dict[int, int] = field(default_factory=dict)
    histories: list[int] = field(default_factory=list)

    def truth(self) -> np.ndarray:
        """[length] int64: what each position of its cache must hold."""
        for position in range(len(self.histories), self.length):
            before = self.histories[-1] if position else EMPTY
            self.histories.append(extend(before, self.tokens[position : position + 1], self.salt))
        return np.asarray(self.histories[: self.length], np.int64)


class FakeExecutor:
    """Executes plans at once and checks each of them; results may be handed over later.

    accept: called with the row, says how many tokens a decode row commits (0 to drafts + 1).
    """

    def __init__(self, geometry: CacheGeometry, drafts: int, accept) -> None:
        self.geometry = geometry
        self.drafts = drafts
        self.accept = accept
        self.pages = np.full((geometry.pages + 1, geometry.page_size), POISON, np.int64)
        self.slots = np.full(geometry.slots + 1, POISON, np.int64)
        self.rows: dict[int, Row] = {}
        self.next_number = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.number == self.next_number
        self.next_number += 1
        for row in plan.leaves.tolist():
            del self.rows[row]
        for join in plan.joins:
            assert join.row >= 1
            assert join.row not in self.rows
            assert 0 <= join.cached < len(join.tokens)
            assert (join.slot > 0) == self.geometry.has_state
            self.rows[join.row] = Row(join.tokens.tolist(), join.cached, join.adapter, join.sampling.stop_token_ids)
        (entries,) = plan.pages
        assert len({(row, index) for row, index, _ in entries.tolist()}) == len(entries), "an entry is written twice"
        for row, index, page in entries.tolist():
            assert 1 <= page <= self.geometry.pages
            self.rows[row].pages[index] = page
        for move in plan.moves:
            pool = self.pages if move.kind is MoveKind.PAGE else self.slots
            assert move.source > 0
            assert move.target > 0
            pool[move.target] = pool[move.source]
        self._check_shape(plan)
        return self._forward(plan)

    def _check_shape(self, plan: StepPlan) -> None:
        counts = [1 + self.drafts] * len(plan.decode.rows) + [chunk.count for chunk in plan.prefill]
        rows = plan.decode.rows.tolist() + [chunk.row for chunk in plan.prefill]
        assert len(set(rows)) == len(rows), "a row is in the step twice"
        assert plan.bounds.tokens == sum(counts)
        assert plan.bounds.requests == len(rows)
        assert plan.bounds.query == max(counts)
        contexts = [self.rows[row].length + count for row, count in zip(rows, counts, strict=True)]
        assert plan.bounds.context >= max(contexts)
        states = list(zip(plan.decode.state_in.tolist(), plan.decode.state_out.tolist(), strict=True))
        states += [(chunk.state_in, chunk.state_out) for chunk in plan.prefill]
        written = [state_out for _, state_out in states if state_out] + [export.slot for export in plan.exports]
        assert len(set(written)) == len(written), "a slot is written twice in a step"
        for state_in, state_out in states:
            assert state_in == 0 or state_in == state_out or state_in not in written, "a slot is read and overwritten"
        for export in plan.exports:
            chunk = plan.prefill[export.chunk]
            assert chunk.row == export.row
            assert 0 < export.offset <= chunk.count
            assert export.offset % CHUNK == 0 or export.offset == chunk.count
        self._check_page_writes(rows, counts)

    def _check_page_writes(self, rows: list[int], counts: list[int]) -> None:
        size = self.geometry.page_size
        touched = {}
        for row in rows:
            for page in self.rows[row].pages.values():
                touched.setdefault(page, set()).add(row)
        for row, count in zip(rows, counts, strict=True):
            first = self.rows[row].length
            for index in range(first // size, (first + count - 1) // size + 1):
                page = self.rows[row].pages[index]
                assert touched[page] == {row}, f"page {page} is written by row {row} and used by {touched[page]}"

    def _run(self, row: Row, tokens: list[int], state_in: int, states: dict[int, int]) -> int:
        """Runs tokens from the row's length on, reading and writing the caches; returns the last history."""
        size = self.geometry.page_size
        truth = row.truth()
        history = EMPTY
        if row.length:
            table = [row.pages[index] for index in range(-(-row.length // size))]
            held = self.pages[table].reshape(-1)[: row.length]
            wrong = np.flatnonzero(held != truth)
            assert not len(wrong), f"positions {wrong.tolist()} of {row.length} hold {held[wrong].tolist()}"
            history = int(held[-1])
        if self.geometry.has_state:
            state = int(self.slots[state_in]) if state_in else EMPTY
            assert state == (truth[-1] if row.length else EMPTY), f"slot {state_in} holds {state} at {row.length}"
        for index, token in enumerate(tokens):
            history = extend(history, [token], row.salt)
            position = row.length + index
            self.pages[row.pages[position // size], position % size] = history
            states[index + 1] = history
        return history

    def _forward(self, plan: StepPlan) -> StepResult:
        width = 1 + self.drafts
        committed: list[list[int]] = []
        writes: dict[int, int] = {}
        parts = zip(
            plan.decode.rows.tolist(), plan.decode.state_in.tolist(), plan.decode.state_out.tolist(), strict=True
        )
        for number, state_in, state_out in parts:
            row = self.rows[number]
            assert len(row.tokens) == row.length + 1
            new = self._decode(row, state_in, state_out, writes)
            committed.append(new)
        for index, chunk in enumerate(plan.prefill):
            row = self.rows[chunk.row]
            assert chunk.start == row.length
            assert chunk.final == (chunk.start + chunk.count == len(row.tokens))
            states: dict[int, int] = {}
            tokens = row.tokens[chunk.start : chunk.start + chunk.count]
            history = self._run(row, tokens, chunk.state_in, states)
            writes[chunk.state_out] = history
            for export in plan.exports:
                if export.chunk == index:
                    writes[export.slot] = states[export.offset]
            row.length += chunk.count
            if chunk.final:
                committed.append([next_token(history)])
                row.tokens.append(next_token(history))
        for slot, state in writes.items():
            if slot:
                self.slots[slot] = state
        result = np.zeros((len(committed), width), np.int32)
        for index, new in enumerate(committed):
            result[index, : len(new)] = new
        return StepResult(result, np.asarray([len(new) for new in committed], np.int32))

    def _decode(self, row: Row, state_in: int, state_out: int, writes: dict[int, int]) -> list[int]:
        size = self.geometry.page_size
        accepted = self.accept(row)
        for position in range(row.length, row.length + 1 + self.drafts):
            self.pages[row.pages[position // size], position % size] = POISON  # drafts that may not be accepted
        states: dict[int, int] = {}
        new: list[int] = []
        inputs = row.tokens[-1:]
        for _ in range(accepted):
            history = self._run(row, inputs, state_in, states)
            new.append(next_token(history))
            row.tokens.append(new[-1])
            row.length += 1
            inputs = new[-1:]
            if self.geometry.has_state:
                self.slots[state_out] = history
                state_in = state_out
        if not accepted:
            self._run(row, [], state_in, states)
        return new


@dataclass
class Job:
    """A request to come. arrival, abort_at: in ticks of the driver; abort_at None: never."""

    prompt: list[int]
    max_tokens: int
    arrival: int = 0
    online: bool = True
    stops: tuple[int, ...] = ()
    abort_at: int | None = None
    adapter: int = 0

    def request(self, name: str) -> Request:
        """The request as the server would make it."""
        return Request(
            name,
            np.asarray(self.prompt, np.int32),
            SamplingParams(max_tokens=self.max_tokens, stop_token_ids=self.stops),
            ServiceClass.ONLINE if self.online else ServiceClass.OFFLINE,
            CacheIdentity(adapter=self.adapter),
        )

    def answer(self, max_context: int) -> list[int]:
        """What the model says without cache, batch or schedule."""
        return generate(self.prompt, min(self.max_tokens, max_context - len(self.prompt)), self.stops, self.adapter)


def options(**given) -> EngineOptions:
    """Engine options for a scheduler alone."""
    return EngineOptions(model="none", **given)


class Driver:
    """A scheduler on the fake executor: submits, plans, executes, commits with a lag of depth - 1 plans, checks."""

    def __init__(
        self,
        geometry: CacheGeometry,
        engine: EngineOptions,
        max_context: int = 4096,
        drafts: int = 0,
        seed: int = 0,
        skip: float = 0.0,
        stop_on_device: bool = False,
    ) -> None:
        self.random = Random(seed)
        self.skip = skip
        self.stop_on_device = stop_on_device
        self.drafts = drafts
        self.scheduler = Scheduler(engine, geometry, max_context, drafts)
        self.executor = FakeExecutor(geometry, drafts, self._accept)
        self.engine = engine
        self.flights: deque[tuple[StepPlan, StepResult]] = deque()
        self.events: dict[str, list[TokenEvent]] = {}
        self.online: dict[str, bool] = {}
        self.plans: list[StepPlan] = []

    def _accept(self, row: Row) -> int:
        if self.stop_on_device and row.tokens[-1] in row.stops:
            return 0
        if self.random.random() < self.skip:
            return 0
        return self.random.randint(1, 1 + self.drafts)

    def submit(self, name: str, job: Job) -> None:
        self.scheduler.submit(job.request(name))
        self.events[name] = []
        self.online[name] = job.online

    def plan(self) -> StepPlan | None:
        """Makes and executes one plan, with everything that is free poisoned first."""
        plan = self.scheduler.plan()
        if plan is not None:
            assert plan.bounds.tokens <= self.engine.step_tokens
            pages, slots = self.scheduler._residency.pages, self.scheduler._residency.slots
            self.executor.pages[pages._stack[: pages.free]] = POISON
            self.executor.slots[slots._stack[: slots.free]] = POISON
            self.executor.pages[0] = self.executor.slots[0] = POISON
            self.flights.append((plan, self.executor.execute(plan)))
            self.plans.append(plan)
        return plan

    def commit(self) -> None:
        """Commits the oldest plan in flight."""
        plan, result = self.flights.popleft()
        for event in self.scheduler.commit(plan, result):
            self.events[event.request_id].append(event)

    def tick(self) -> bool:
        """As many plans as may be in flight, then one commit. False if there was nothing to do."""
        while self.plan() is not None:
            pass
        if not self.flights:
            return False
        self.commit()
        return True

    def finish(self, limit: int = 100_000) -> None:
        """Ticks until all is done."""
        for _ in range(limit):
            if not self.tick():
                break
        assert self.scheduler.unfinished == 0, f"{self.scheduler.unfinished} requests are stuck"
        self.scheduler.check_integrity()

    def answer(self, name: str) -> list[int]:
        """The tokens a client has got."""
        return [token for event in self.events[name] for token in event.tokens]

    def run(self, jobs: list[Job]) -> None:
        """Runs jobs to their ends, and checks every answer."""
        names = [f"job{index}" for index in range(len(jobs))]
        last = max([job.arrival for job in jobs] + [job.abort_at or 0 for job in jobs])
        aborted = set()
        for tick in range(last + 1):
            for name, job in zip(names, jobs, strict=True):
                if job.arrival == tick:
                    self.submit(name, job)
                if job.abort_at == tick and name in self.events and self.scheduler.abort(name):
                    aborted.add(name)
                    self.events[name].append(TokenEvent(name, [], FinishReason.ABORT))
            self.tick()
            self.scheduler.check_integrity()
        self.finish()
        for name, job in zip(names, jobs, strict=True):
            expected = job.answer(self.scheduler.max_context)
            if name in aborted:
                assert self.answer(name) == expected[: len(self.answer(name))]
                assert self.events[name][-1].finish is FinishReason.ABORT
                continue
            assert self.answer(name) == expected, f"{name} differs"
            finishes = [event.finish for event in self.events[name]]
            assert finishes[:-1] == [None] * (len(finishes) - 1)
            stopped = expected[-1] in job.stops
            assert finishes[-1] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert self.events[name][0].cached_tokens is not None
        self.scheduler.clear_cache()
        self.scheduler.check_integrity()
        residency = self.scheduler._residency
        assert residency.pages.free == residency.pages.total
        assert residency.slots.free == residency.slots.total
