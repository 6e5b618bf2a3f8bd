"""Trace files: a request a line, with what is asked, how long the answer is, and when it arrives.

    {"time_seconds": 0.0, "prompt": "Once upon a time", "output_tokens": 100}
    {"time_seconds": 0.4, "prompt_token_ids": [17, 4, 250], "output_tokens": 20}
    {"time_seconds": 0.9, "messages": [{"role": "user", "content": "Hello"}], "output_tokens": 50}
    {"time_seconds": 1.1, "input_tokens": 4000, "output_tokens": 80}

A line that gives a length alone gets random tokens. Times are seconds from the start; either all lines have one, or none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from firstlight.bench.errors import BenchError
from firstlight.config import LARGEST_TOKEN_ID, MOST_TOKENS

TokenId = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_TOKEN_ID)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request. Of the first four, exactly one is set. output_tokens: None for what --output-tokens says."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)] | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    time_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None

    @property
    def kind(self) -> str:
        """The name of what it asks with."""
        return next(name for name in ASKED if getattr(self, name) is not None)


ASKED = ("prompt", "prompt_token_ids", "messages", "input_tokens")


def read_trace(path: str | Path, limit: int = 0) -> list[TraceLine]:
    """The requests of a file in the order of their times; `limit`: the first so many lines alone, 0 is all.

    Raises BenchError that names the line.
    """
    lines: list[TraceLine] = []
    decoder = msgspec.json.Decoder(TraceLine)
    try:
        with Path(path).open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                lines.append(_checked(decoder, text, f"{path}, line {number}"))
                if len(lines) == limit:
                    break
    except OSError as error:
        raise BenchError(f"--trace {path}: {error.strerror or error}") from None
    if not lines:
        raise BenchError(f"--trace {path}: it has no line with a request")
    timed = [line.time_seconds for line in lines if line.time_seconds is not None]
    if timed and len(timed) < len(lines):
        raise BenchError(f"--trace {path}: {len(timed)} of {len(lines)} lines have `time_seconds`; all or none must")
    return sorted(lines, key=lambda line: line.time_seconds or 0.0)


def _checked(decoder: msgspec.json.Decoder[TraceLine], text: bytes, where: str) -> TraceLine:
    try:
        line = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BenchError(f"{where}: {error}") from None
    given = [name for name in ASKED if getattr(line, name) is not None]
    if len(given) != 1:
        names = ", ".join(f"`{name}`" for name in ASKED)
        raise BenchError(f"{where}: it must have exactly one of {names}; it has {', '.join(given) or 'none'}")
    return line
