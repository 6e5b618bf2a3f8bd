"""Many requests at once: a closed loop, where each answer makes room for the next request, or arrivals by the clock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.bench.client import Client
from firstlight.bench.errors import BenchError
from firstlight.bench.outcome import Failure, Outcome
from firstlight.bench.prompts import Session
from firstlight.config import BenchOptions

SPARE_FILES = 64
"""Open files beside the connections."""

OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True)
class Run:
    """A load that is over. bound: requests at once at most; None without a bound. began: of time.perf_counter.
    seconds: from the start to the last answer's end. cpu_seconds: what this client itself took."""

    outcomes: list[Outcome]
    bound: int | None
    began: float
    seconds: float
    cpu_seconds: float


class Dialogue:
    """What has been said in a session: each turn repeats it before what is new."""

    def __init__(self, session: Session) -> None:
        first = session.turns[0].prompt
        self._text = "" if isinstance(first, str) else None
        self._ids: list[int] = []
        self._messages: list[dict[str, Any]] = []
        self._said_tokens = 0
        self._turns = session.turns

    def content(self, number: int) -> dict[str, Any]:
        """`prompt` or `messages` of a turn."""
        prompt = self._turns[number].prompt
        if isinstance(prompt, str):
            self._text = (self._text or "") + prompt
            return {"prompt": self._text}
        if isinstance(prompt, list):
            self._messages += prompt
            return {"messages": list(self._messages)}
        self._ids += prompt.tolist()
        return {"prompt": list(self._ids)}

    def input_tokens(self, number: int) -> int:
        """Tokens of a turn's whole prompt, as far as is known."""
        return self._said_tokens + self._turns[number].input_tokens

    def answered(self, outcome: Outcome) -> None:
        """Take the answer into what has been said; one that can't be said again has failed."""
        self._said_tokens = outcome.prompt_tokens + outcome.generated
        if self._text is not None:
            self._text += outcome.answer
        elif self._messages:
            self._messages.append({"role": "assistant", "content": outcome.answer})
        elif outcome.told_ids is None:
            outcome.failure = Failure(
                "no_ids", "the server doesn't tell token ids (return_token_ids); give --tokenizer"
            )
        else:
            self._ids += outcome.answer_ids


async def run_load(
    client: Client, options: BenchOptions, sessions: Sequence[Session], on_outcome: OnOutcome = lambda _: None
) -> Run:
    """Send the sessions, all by their times or none, and wait for every answer.

    on_outcome: called as each request ends. Raises BenchError when the system allows too few connections.
    """
    timed = sessions[0].due is not None if sessions else False
    bound = options.concurrency or (len(sessions) if timed else 1)
    _allow_files(min(bound, len(sessions)))
    outcomes: list[Outcome] = []

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        on_outcome(outcome)

    with _no_collection():
        cpu = _cpu_seconds()
        began = time.perf_counter()
        numbered = iter(enumerate(sessions))
        async with asyncio.TaskGroup() as group:
            if timed:
                free = asyncio.Semaphore(bound)
                for number, session in numbered:
                    due = began + (session.due or 0.0)
                    await asyncio.sleep(max(due - time.perf_counter(), 0))
                    group.create_task(_when_free(free, _converse(client, options, number, session, due, ended)))
            else:

                async def work() -> None:
                    for number, session in numbered:  # shared: each worker takes the next one
                        await _converse(client, options, number, session, None, ended)

                for _ in range(min(bound, len(sessions))):
                    group.create_task(work())
        seconds = time.perf_counter() - began
        cpu = _cpu_seconds() - cpu
    outcomes.sort(key=lambda outcome: (outcome.session, outcome.turn))
    return Run(outcomes, options.concurrency or (None if timed else 1), began, seconds, cpu)


async def warm_up(client: Client, options: BenchOptions, sessions: Sequence[Session]) -> None:
    """Send the sessions, as many at once as the load will have. Raises BenchError if one fails: so would the load."""
    plain = options.model_copy(update={"concurrency": options.concurrency or len(sessions), "rate": 0.0})
    run = await run_load(client, plain, [Session(session.turns) for session in sessions])
    for outcome in run.outcomes:
        if outcome.failure is not None:
            raise BenchError(f"a warm-up request failed: {outcome.failure.kind}: {outcome.failure.message}")


async def _when_free(free: asyncio.Semaphore, work: Any) -> None:
    async with free:
        await work


async def _converse(
    client: Client, options: BenchOptions, number: int, session: Session, due: float | None, ended: OnOutcome
) -> None:
    """All turns of a session, one after the other. After a failure the rest is noted as not sent."""
    dialogue = Dialogue(session)
    keep_answer = len(session.turns) > 1
    failed = False
    for place, turn in enumerate(session.turns):
        outcome = Outcome(
            number, place, dialogue.input_tokens(place), turn.output_tokens, due=due if place == 0 else None
        )
        if failed:
            outcome.failure = Failure("not_sent", f"turn {place} of conversation {number}: an earlier answer failed")
            ended(outcome)
            continue
        if place and options.think_seconds:
            await asyncio.sleep(options.think_seconds)
        await client.ask(dialogue.content(place), outcome, keep_answer)
        if keep_answer and outcome.failure is None:
            dialogue.answered(outcome)
        failed = outcome.failure is not None
        outcome.answer, outcome.answer_ids = "", []
        ended(outcome)


def _allow_files(connections: int) -> None:
    """Raise the limit of open files to what the load needs. Raises BenchError if the system doesn't let us."""
    needed = connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchError(
            f"{connections} connections at once need {needed} open files, and {hard} are allowed (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away from what is there already: its pauses would be reported as the server's."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
