"""The API process's view of the engine: submit a prompt, get its tokens.

One asyncio task reads the engine's messages and hands each request its part. Tokens are not queued one by one: they
are appended to the request's list, and whoever waits for them takes all there are. A reader that is slow therefore
gets fewer, larger pieces, its backlog is at most the tokens it asked for, and a step wakes each waiting reader once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq.asyncio

from firstlight.engine.messages import (
    Abort,
    Accepted,
    Delta,
    EngineStats,
    Failed,
    Generate,
    GetStats,
    MessageError,
    Rejected,
    ToEngine,
    Tokens,
    decode_from_engine,
    encode,
    pack_tokens,
)
from firstlight.scheduling.sampling import FinishReason, SamplingParams, ServiceClass
from firstlight.server.metrics import Metrics
from firstlight.server.spawn import EngineFailedError, EngineProcess

logger = logging.getLogger(__name__)


class QueueFullError(Exception):
    """As many requests wait as may. The message says how many."""


class RefusedError(Exception):
    """The engine can't run this request; see messages.Rejected."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Generation:
    """A submitted prompt and what has come of it. Read it after `changed` is set.

    changed: may be shared by several generations, whose owner waits for news of any of them.
    only_end: `changed` is set only when nothing more will come, for owners that want the whole answer.
    fresh: tokens that nobody has taken yet.
    error: what ended it early, QueueFullError excepted.
    """

    id: str
    prompt_tokens: int
    service_class: ServiceClass
    changed: asyncio.Event
    only_end: bool
    arrival: float
    accepted: bool = False
    fresh: list[int] = field(default_factory=list)
    generated: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    last_token_at: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    def take(self) -> list[int]:
        """The tokens since the last call."""
        fresh, self.fresh = self.fresh, []
        return fresh


class EngineClient:
    """Owns the socket of a started engine process from inside an event loop."""

    def __init__(self, process: EngineProcess, metrics: Metrics, limit: int) -> None:
        """limit: requests in the engine at most, running and waiting together."""
        self._process = process
        self._socket = zmq.asyncio.Socket(process.socket)
        self._metrics = metrics
        self._limit = limit
        self._ids = itertools.count()
        self._live: dict[str, Generation] = {}
        self._stats = EngineStats()
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self.failure: EngineFailedError | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self._reader = asyncio.create_task(self._read(), name="engine-reader")
        process.watch(lambda: self._loop.call_soon_threadsafe(self._process_ended))

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        service_class: ServiceClass,
        *,
        arrival: float,
        only_end: bool,
    ) -> list[Generation]:
        """Start all prompts, or none. Raises QueueFullError, or EngineFailedError when the engine is gone.

        arrival: the request's time.monotonic(). Whoever gets the generations calls `release` with them in the end.
        """
        if self.failure is not None:
            raise self.failure
        if len(self._live) + len(prompts) > self._limit:
            raise QueueFullError(f"{len(self._live)} requests are running or waiting; the limit is {self._limit}")
        changed = asyncio.Event()
        generations = []
        for prompt, parameters in zip(prompts, sampling, strict=True):
            id = str(next(self._ids))
            self._send(Generate(id, pack_tokens(prompt), parameters, service_class))
            generation = Generation(id, len(prompt), service_class, changed, only_end, arrival)
            self._live[id] = generation
            generations.append(generation)
        return generations

    def release(self, generations: Sequence[Generation]) -> None:
        """The caller wants no more of these: those that still run are aborted."""
        unfinished = [generation.id for generation in generations if self._live.pop(generation.id, None) is not None]
        if unfinished and self.failure is None:
            self._send(Abort(unfinished))

    async def stats(self, timeout: float = 1.0) -> EngineStats:
        """The engine's counts now, or the last known ones if it doesn't answer within `timeout` seconds."""
        if self.failure is None:
            waiter: asyncio.Future[EngineStats] = self._loop.create_future()
            self._stats_waiters.append(waiter)
            self._send(GetStats())
            await asyncio.wait([waiter], timeout=timeout)
        return self._stats

    async def close(self) -> None:
        """Stop reading and end the engine process."""
        self._closing = True
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self._fail(EngineFailedError("the server shuts down"))
        await asyncio.to_thread(self._process.close)

    def _send(self, message: ToEngine) -> None:
        self._socket.send(encode(message))  # goes out at once; the socket's queue is unbounded, what we put in is not

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                message = decode_from_engine(data)
            except MessageError as error:
                logger.error("ignored what the engine sent: %s", error)
                continue
            if isinstance(message, Tokens):
                self._distribute(message.deltas)
            elif isinstance(message, Accepted):
                for id in message.ids:
                    if (generation := self._live.get(id)) is not None:
                        generation.accepted = True
                        if not generation.only_end:
                            generation.changed.set()
            elif isinstance(message, Rejected):
                if (rejected := self._live.pop(message.id, None)) is not None:
                    rejected.error = RefusedError(message.status, message.message)
                    rejected.changed.set()
            elif isinstance(message, EngineStats):
                self._stats = message
                for waiter in self._stats_waiters:
                    if not waiter.done():
                        waiter.set_result(message)
                self._stats_waiters.clear()
            elif isinstance(message, Failed):
                self._fail(EngineFailedError(message.message))

    def _distribute(self, deltas: list[Delta]) -> None:
        now = time.monotonic()
        for delta in deltas:
            generation = self._live.get(delta.id)
            if generation is None:
                continue  # released while the step ran
            if delta.tokens:
                self._metrics.saw_tokens(generation, len(delta.tokens), now)
                generation.fresh += delta.tokens
                generation.generated += len(delta.tokens)
                generation.last_token_at = now
            generation.accepted = True
            generation.cached_tokens = max(generation.cached_tokens, delta.cached_tokens)
            if delta.finish_reason is not None:
                generation.finish_reason = delta.finish_reason
                del self._live[delta.id]
                generation.changed.set()
            elif not generation.only_end:
                generation.changed.set()

    def _process_ended(self) -> None:
        # What it sent before it died, its own account of why included, may still be in the socket.
        self._loop.call_later(0.2, lambda: self._fail(EngineFailedError(self._process.obituary())))

    def _fail(self, failure: EngineFailedError) -> None:
        """End every generation with `failure`; the first one stays."""
        if self.failure is not None:
            return
        self.failure = failure
        for generation in self._live.values():
            generation.error = failure
            generation.changed.set()
        self._live.clear()
        for waiter in self._stats_waiters:
            if not waiter.done():
                waiter.set_result(self._stats)
        self._stats_waiters.clear()
        if not self._closing:
            logger.error("the engine is gone: %s", failure)
            self.on_failure()
