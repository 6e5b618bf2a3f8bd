"""A job while it runs: from the engine's tokens, as they come, to pieces of answers and token counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from firstlight.scheduling.sampling import FinishReason
from firstlight.server.answer import Answer, Piece
from firstlight.server.engine_client import EngineClient, Generation, RefusedError
from firstlight.server.errors import ApiError
from firstlight.server.metrics import Metrics


@dataclass(frozen=True)
class Usage:
    """Token counts of a request, all its prompts together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Run:
    """A job in the engine. Whoever has it calls `close` in the end, which frees what still runs."""

    def __init__(
        self, client: EngineClient, metrics: Metrics, generations: list[Generation], answers: list[Answer]
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._generations = generations
        self._answers = answers
        self._changed = generations[0].changed

    async def wait_accepted(self) -> None:
        """Wait until the engine has every prompt in its queue. Raises ApiError when it refuses one."""
        while not all(generation.accepted or generation.ended for generation in self._generations):
            self._changed.clear()
            await self._changed.wait()
        self._raise_errors()
        self._changed.set()  # tokens may have come meanwhile

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What is new, for as many prompts as have news, until all are finished. Raises ApiError."""
        while not all(answer.finished for answer in self._answers):
            await self._changed.wait()
            self._changed.clear()
            self._raise_errors()
            news = []
            for generation, answer in zip(self._generations, self._answers, strict=True):
                if answer.finished or not (generation.fresh or generation.ended):
                    continue
                piece = answer.push(generation.take(), generation.finish_reason)
                if answer.finished:
                    self._client.release([generation])
                news.append(piece)
            if news:
                yield news

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            sum(generation.prompt_tokens for generation in self._generations),
            sum(answer.token_count for answer in self._answers),
            sum(generation.cached_tokens for generation in self._generations),
        )

    def close(self) -> None:
        """Abort what still runs, and count how each prompt ended."""
        self._client.release(self._generations)
        for generation, answer in zip(self._generations, self._answers, strict=True):
            if isinstance(generation.error, RefusedError):
                outcome = "refused"
            elif generation.error is not None:
                outcome = "failed"
            else:
                outcome = answer.finish_reason or FinishReason.ABORT  # the client left
            self._metrics.ended(generation, outcome)

    def _raise_errors(self) -> None:
        for generation in self._generations:
            if isinstance(generation.error, RefusedError):
                raise ApiError(generation.error.status, str(generation.error), code="request_refused")
            if generation.error is not None:
                raise engine_gone(generation.error)


def engine_gone(failure: Exception) -> ApiError:
    """The answer to every request once the engine is dead."""
    return ApiError(503, f"the engine is gone: {failure}", code="engine_failed")
