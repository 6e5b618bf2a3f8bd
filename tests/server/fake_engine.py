"""An engine without a model, for tests of the server: its answers are known in advance.

Greedy, it answers with the prompt's own tokens and then END, over and over if END is ignored. At a temperature above
0 it answers with letters that depend on seed and position alone. Some token ids at the start of a prompt make it
misbehave.

FAKE_ENGINE_STEP_SECONDS: how long a step takes. FAKE_ENGINE_START: `fail` or `crash` instead of starting.
FAKE_ENGINE_EXIT_SECONDS: how long the process takes to end once it has closed its socket, as one that frees a GPU does.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import time
from dataclasses import dataclass

from firstlight.config import EngineOptions
from firstlight.engine.messages import Delta, EngineStats
from firstlight.scheduling.errors import RequestRefusedError
from firstlight.scheduling.request import Request
from firstlight.scheduling.sampling import FinishReason, ServiceClass

END = 256
DIES = 260  # the process is gone
RAISES = 261  # the step fails with an exception
REFUSED = 262  # never fits
VOCAB_SIZE = 300
PAGE_SIZE = 16
PAGES = 512


@dataclass
class Running:
    request: Request
    generated: int = 0

    @property
    def pages(self) -> int:
        return -(-(len(self.request.prompt) + self.generated) // PAGE_SIZE)


class FakeEngine:
    def __init__(self, options: EngineOptions) -> None:
        start = os.environ.get("FAKE_ENGINE_START")
        if start == "fail":
            raise ValueError("config.json: `layers` is -1; it must be at least 1")
        if start == "crash":
            os._exit(7)
        atexit.register(time.sleep, float(os.environ.get("FAKE_ENGINE_EXIT_SECONDS", "0")))
        self.max_context = options.max_context or 512
        self.vocab_size = VOCAB_SIZE
        self.facts = {"device": "none"}
        self.max_running = options.max_running
        self.step_seconds = float(os.environ.get("FAKE_ENGINE_STEP_SECONDS", "0"))
        self.running: dict[str, Running] = {}
        self.waiting: dict[str, Running] = {}
        self.seen_prefixes: set[int] = set()
        self.counts = {"steps": 0, "prefix_queried_tokens": 0, "prefix_matched_tokens": 0}

    def add(self, request: Request) -> None:
        if request.prompt[0] == REFUSED:
            raise RequestRefusedError(400, "the prompt needs 900 pages and the engine has 512")
        self.waiting[request.id] = Running(request)

    def abort(self, id: str) -> None:
        self.running.pop(id, None)
        self.waiting.pop(id, None)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def check(self) -> None:
        pass

    def step(self) -> list[Delta]:
        time.sleep(self.step_seconds)
        self.counts["steps"] += 1
        while self.waiting and len(self.running) < self.max_running:
            id = next(iter(self.waiting))
            self.running[id] = self.waiting.pop(id)
        return [self._advance(id, running) for id, running in list(self.running.items())]

    def _advance(self, id: str, running: Running) -> Delta:
        request = running.request
        if request.prompt[0] == DIES:
            os._exit(9)
        if request.prompt[0] == RAISES:
            raise RuntimeError("an illegal memory access")
        cached = 0
        if running.generated == 0:
            cached = self._cached(request)
        token = self._token(request, running.generated)
        running.generated += 1
        reason = None
        if token in request.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif running.generated == request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self.running[id]
        return Delta(id, [token], reason, cached)

    def _cached(self, request: Request) -> int:
        """A prompt seen before is cached but for its last token."""
        key = hash(request.prompt.tobytes())
        cached = len(request.prompt) - 1 if key in self.seen_prefixes else 0
        self.seen_prefixes.add(key)
        self.counts["prefix_queried_tokens"] += len(request.prompt)
        self.counts["prefix_matched_tokens"] += cached
        return cached

    @staticmethod
    def _token(request: Request, position: int) -> int:
        if request.sampling.temperature > 0:
            noise = hashlib.blake2b(f"{request.sampling.seed} {position}".encode(), digest_size=4).digest()
            return ord("a") + int.from_bytes(noise) % 26
        tokens = [*request.prompt.tolist(), END]
        return tokens[position % len(tokens)]

    def stats(self) -> EngineStats:
        def count(requests: dict[str, Running]) -> dict[ServiceClass, int]:
            return {
                service: sum(running.request.service is service for running in requests.values())
                for service in ServiceClass
            }

        return EngineStats(
            running=count(self.running),
            waiting=count(self.waiting),
            pages_used=sum(running.pages for running in self.running.values()),
            pages_capacity=PAGES,
            page_size=PAGE_SIZE,
            **self.counts,
        )

    def close(self) -> None:
        pass
