"""`firstlight generate MODEL -i prompts.jsonl -o answers.jsonl`: many prompts, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight.cli.options import load, options_of
from firstlight.config import EngineOptions

if TYPE_CHECKING:
    from firstlight.cli.backend import Backend
    from firstlight.cli.jsonl import InputLine, OutputFile

BUSY_SECONDS = 1.0
"""Pause before a request that met a full queue is sent again."""


@options_of(EngineOptions)
def command(
    given: dict[str, Any],
    input: Annotated[Path, typer.Option("--input", "-i", help="JSONL: a request a line.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL: an answer a line; lines it has are kept.")],
    url: Annotated[str | None, typer.Option(help="Ask the server at this URL instead of loading a model.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The key of that server.", envvar="FIRSTLIGHT_API_KEY")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="For lines that have none (default: 16 for `prompt`, all that fits for `messages`)."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="For lines that have none (default: 1.0; 0: always the likeliest token).")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, max=4096, help="Requests at once.")] = 256,
) -> None:
    """Answer a file of prompts, as fast as the model allows.

    A line has `prompt`, `messages` or `prompt_token_ids`, any sampling field of the API, and an `id` if you like.
    Answers are written as they come, with the line's number as `index` and its `id`. Run the same command again to go
    on after a stop, and to try refused lines again.
    """
    options = None if url else load(EngineOptions, given)
    import asyncio
    import sys

    from firstlight.cli.jsonl import OutputFile, read_lines

    defaults = {"max_tokens": max_tokens, "temperature": temperature}
    defaults = {name: value for name, value in defaults.items() if value is not None}
    with OutputFile(output) as out:
        lines = [line for line in read_lines(input) if line.key not in out.done]
        if out.done:
            there = "1 answer is" if len(out.done) == 1 else f"{len(out.done)} answers are"
            print(f"firstlight: {there} there already, {len(lines)} to go", file=sys.stderr)
        errors = asyncio.run(_generate(options, url, api_key, lines, out, defaults, parallel)) if lines else 0
    if errors:
        answers = len(out.done) + len(lines) - errors
        print(
            f"firstlight: {answers} answer{'s' * (answers != 1)}, {errors} refused; see `error` in {output}",
            file=sys.stderr,
        )
        raise typer.Exit(1)


async def _generate(
    options: EngineOptions | None,
    url: str | None,
    key: str | None,
    lines: list[InputLine],
    out: OutputFile,
    defaults: dict[str, Any],
    parallel: int,
) -> int:
    """Answer the lines; returns how many were refused."""
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from firstlight.cli.backend import open_backend

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(lines), rate="loading the model" if options else "")
        async with open_backend(options, url, key, limit=parallel) as backend:
            queue = iter(lines)
            begin = asyncio.get_running_loop().time()
            tokens = refused = 0

            async def work() -> None:
                nonlocal tokens, refused
                for line in queue:  # shared: each worker takes the next line
                    # By its place in the input: a run that goes on after a stop draws what it would have drawn.
                    seed = {"seed": _line_seed(options.seed, line.index)} if options else {}
                    answer = await _answer(backend, line, seed | defaults)
                    out.write(line, answer)
                    refused += "error" in answer
                    tokens += answer.get("usage", {}).get("completion_tokens", 0)
                    seconds = asyncio.get_running_loop().time() - begin
                    progress.update(bar, advance=1, rate=f"{tokens / max(seconds, 1e-9):.0f} tokens/s")

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(parallel, len(lines))):
                        group.create_task(work())
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None  # the others say the same
            return refused


def _line_seed(seed: int, index: int) -> int:
    import hashlib

    digest = hashlib.blake2b(f"{seed} line {index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


async def _answer(backend: Backend, line: InputLine, defaults: dict[str, Any]) -> dict[str, Any]:
    """What is written for a line: its answer, or the error that says what is wrong with it."""
    import asyncio

    from firstlight.cli.backend import RequestError

    if line.error:
        return {
            "error": {"message": line.error, "type": "invalid_request_error", "param": None, "code": "invalid_line"}
        }
    if "max_completion_tokens" in line.fields:
        defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
    while True:
        try:
            reply = await backend.complete({**defaults, **line.fields}, "offline")
        except RequestError as error:
            if error.status == 429:
                await asyncio.sleep(BUSY_SECONDS)
                continue
            return error.body
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        answer = {"text": text, "finish_reason": choice["finish_reason"], "usage": reply["usage"]}
        return {**answer, "token_ids": choice["token_ids"]} if "token_ids" in choice else answer
