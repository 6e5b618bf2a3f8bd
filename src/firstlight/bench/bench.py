"""A whole benchmark: the server asked for its model, the load made, warm-up, the load, the figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from firstlight.bench.client import Client
from firstlight.bench.errors import BenchError
from firstlight.bench.load import Run, run_load, warm_up
from firstlight.bench.metrics import Summary, parse_slo, summarise
from firstlight.bench.outcome import Outcome
from firstlight.bench.prompts import Codec, make_sessions, make_warm_up
from firstlight.bench.report import as_json
from firstlight.bench.trace import read_trace
from firstlight.config import LARGEST_TOKEN_ID, BenchOptions, Span


class Watcher(Protocol):
    """Who is told how it goes."""

    def warming_up(self) -> None:
        """The options fit together, and the server answers."""

    def began(self, client: Client, requests: int) -> None:
        """The clock has started. requests: in all, turns counted. `client.tokens_seen` grows from now on."""

    def ended(self, outcome: Outcome) -> None:
        """A request has its end."""


class Nobody:
    """A watcher that doesn't watch."""

    def warming_up(self) -> None:
        """Nothing."""

    def began(self, client: Client, requests: int) -> None:
        """Nothing."""

    def ended(self, outcome: Outcome) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Result:
    """A benchmark that is over."""

    options: BenchOptions
    model: dict[str, Any]
    run: Run
    summary: Summary

    def as_json(self, detailed: bool = False) -> dict[str, Any]:
        """See report.as_json."""
        return as_json(self.options, self.model, self.run, self.summary, detailed)


async def bench(options: BenchOptions, codec: Codec | None = None, watcher: Watcher | None = None) -> Result:
    """Put the load on the server. codec: the tokenizer that --tokenizer names, loaded.

    Raises BenchError when the options don't fit together, the server doesn't answer, or a warm-up request fails.
    Requests of the load that fail are part of the result.
    """
    watcher = watcher or Nobody()
    objectives = parse_slo(options.slo)
    lines = read_trace(options.trace, options.requests) if options.trace else None
    if options.turns.high > 1 and options.endpoint == "completions" and codec is None:
        options = options.model_copy(update={"return_token_ids": True})  # answers are said again, as ids
    async with Client(options) as client:
        await client.find_model()
        vocabulary = _vocabulary(options, codec, client.model)
        sessions = make_sessions(options, lines, codec, vocabulary)
        watcher.warming_up()
        await warm_up(client, options, make_warm_up(options, lines, codec, vocabulary))
        client.tokens_seen = 0
        watcher.began(client, sum(len(session.turns) for session in sessions))
        run = await run_load(client, options, sessions, watcher.ended)
        return Result(options, client.model, run, summarise(run, objectives))


def _vocabulary(options: BenchOptions, codec: Codec | None, model: dict[str, Any]) -> Span | None:
    """Ids of random tokens: the option's, the tokenizer's, or those of a server that tells them; None: nobody knows."""
    if options.token_range is not None:
        return options.token_range
    size = codec.vocab_size if codec is not None else model.get("vocab_size")
    if size is None:
        return None
    if not isinstance(size, int) or not 1 <= size <= LARGEST_TOKEN_ID + 1:
        raise BenchError(f"the server says that its vocabulary has {size!r} tokens; give --token-range")
    return Span(0, size - 1)
