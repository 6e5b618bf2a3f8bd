"""`firstlight bench`: load on a server, and how well it bears it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight.cli.options import load, options_of
from firstlight.config import BenchOptions

if TYPE_CHECKING:
    from rich.progress import Progress

    from firstlight.bench.client import Client
    from firstlight.bench.outcome import Outcome
    from firstlight.bench.prompts import Codec
    from firstlight.weights.tokenizer import Tokenizer

REFRESH_SECONDS = 0.5


@options_of(BenchOptions)
def command(
    given: dict[str, Any],
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    details: Annotated[
        bool, typer.Option("--details", help="In it, lists with an entry for each request, too.")
    ] = False,
) -> None:
    """Measure a server under load, through OpenAI's API: ours, vLLM's, SGLang's, or any other that streams.

    Without --rate and times in a --trace it is a closed loop of --concurrency requests. Latencies are of answered
    requests; failures are counted by kind. Exit status: 0 all were answered, 1 some failed.
    """
    options = load(BenchOptions, given)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from firstlight.bench.bench import bench
    from firstlight.bench.report import show
    from firstlight.cli.output_file import check_output, write_output
    from firstlight.cli.tables import table_console
    from firstlight.errors import FirstlightError

    if json is not None:
        check_output("--json", json)
    elif details:
        raise FirstlightError("--details: they are written to the JSON; give --json FILE")
    codec = _codec(options)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[state]}"))
    with ExitStack() as stack:
        progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=1 / REFRESH_SECONDS)
        result = asyncio.run(bench(options, codec, _Bar(progress, stack)))
    show(table_console(), result.options, result.summary)
    if json is not None:
        import msgspec

        figures = msgspec.json.encode(result.as_json(details))
        write_output("--json", json, msgspec.json.format(figures, indent=1) + b"\n")
    if result.summary.failed:
        raise typer.Exit(1)


class _Bar:
    """Shows requests done, tokens a second over the run so far, and failures. It costs nothing by chunk.

    It is drawn from the warm-up on, until `stack` is closed: nothing stands before errors of options.
    """

    def __init__(self, progress: Progress, stack: ExitStack) -> None:
        self._progress = progress
        self._stack = stack
        self._task = progress.add_task("", total=None, state="warming up")
        self._failed = 0

    def warming_up(self) -> None:
        self._stack.enter_context(self._progress)

    def began(self, client: Client, requests: int) -> None:
        self._client = client
        self._start = time.perf_counter()
        self._progress.update(self._task, total=requests)
        self._refreshing = asyncio.create_task(self._refresh())

    def ended(self, outcome: Outcome) -> None:
        self._failed += outcome.failure is not None
        self._progress.advance(self._task)
        self._show()

    async def _refresh(self) -> None:
        while not self._progress.finished:
            self._show()
            await asyncio.sleep(REFRESH_SECONDS)

    def _show(self) -> None:
        rate = self._client.tokens_seen / max(time.perf_counter() - self._start, 1e-9)
        failures = f", {self._failed} failed" if self._failed else ""
        self._progress.update(self._task, state=f"{rate:.0f} generated tokens/s{failures}")


class _TokenizerCodec:
    """A checkpoint's tokenizer as the load needs it. special: whether the server adds its special tokens to a text."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._special = special

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=self._special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def _codec(options: BenchOptions) -> Codec | None:
    if options.tokenizer is None:
        return None
    from firstlight.errors import FirstlightError
    from firstlight.weights.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer is None:
        raise FirstlightError(f"--tokenizer {options.tokenizer}: this checkpoint has no tokenizer")
    return _TokenizerCodec(tokenizer, special=options.endpoint == "completions")
