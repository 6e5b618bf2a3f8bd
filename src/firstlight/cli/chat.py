"""`firstlight chat MODEL`: a conversation in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight.cli.options import load, options_of
from firstlight.config import EngineOptions

if TYPE_CHECKING:
    from firstlight.cli.backend import Backend

HELP = "/clear forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer."


@options_of(EngineOptions)
def command(
    given: dict[str, Any],
    url: Annotated[str | None, typer.Option(help="Talk to the server at this URL instead of loading a model.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The key of that server.", envvar="FIRSTLIGHT_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens whose probabilities reach this.")] = 0.95,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer at most; default: as many as fit.")
    ] = None,
) -> None:
    """Chat with a model in the terminal."""
    options = None if url else load(EngineOptions, given)
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    _chat(options, url, api_key, system, sampling)


def _chat(
    options: EngineOptions | None, url: str | None, key: str | None, system: str | None, sampling: dict[str, Any]
) -> None:
    import asyncio
    import sys

    from rich.console import Console

    from firstlight.cli.backend import RequestError, open_backend

    console = Console(highlight=False, markup=False, stderr=True)
    if options:
        _need_tokenizer(options.model)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    # The event loop runs while the model answers, not while the user types: Ctrl-C then means what it always does.
    with asyncio.Runner() as runner:
        opening = open_backend(options, url, key, limit=8)
        with console.status("loading the model ..."):
            backend = runner.run(opening.__aenter__())
        try:
            if sys.stdin.isatty():
                console.print(HELP, style="dim")
            while (line := _read_line()) != "/exit":
                if line == "/clear":
                    messages = list(start)
                elif line.startswith("/"):
                    console.print(HELP, style="dim")
                elif line:
                    question = {"role": "user", "content": line}
                    try:
                        answer = runner.run(_answer(backend, {"messages": [*messages, question], **sampling}, console))
                    except RequestError as error:
                        console.print(f"refused: {error}", style="red")
                    except KeyboardInterrupt:
                        console.print("stopped; the question is forgotten", style="dim")
                    else:
                        messages += [question, {"role": "assistant", "content": answer}]
        finally:
            runner.run(opening.__aexit__(None, None, None))


def _need_tokenizer(model: str) -> None:
    import sys

    from firstlight.server.service import NO_TOKENIZER
    from firstlight.weights.tokenizer import load_tokenizer

    if load_tokenizer(model) is None:
        print(f"firstlight: error: {model}: {NO_TOKENIZER}", file=sys.stderr)
        raise typer.Exit(2)


async def _answer(backend: Backend, fields: dict[str, Any], console: Any) -> str:
    """Print an answer as it comes; returns it."""
    begin = time.monotonic()
    first = 0.0
    texts: list[str] = []
    usage: dict[str, Any] = {}
    async for chunk in backend.stream(fields):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                first = first or time.monotonic()
                texts.append(text)
                print(text, end="", flush=True)
    print(flush=True)  # before the line below, which goes to stderr
    tokens = usage.get("completion_tokens", 0)
    if tokens > 1 and first:
        rate = (tokens - 1) / max(time.monotonic() - first, 1e-9)
        console.print(f"{tokens} tokens, first after {first - begin:.2f} s, then {rate:.1f} a second", style="dim")
    return "".join(texts)


def _read_line() -> str:
    """A line that the user typed; the end of the input is as good as /exit."""
    import sys

    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return "/exit"
