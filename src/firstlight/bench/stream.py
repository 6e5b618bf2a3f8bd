"""Reading a streamed answer: server-sent events, as OpenAI's servers write them.

Each event is one `data:` line with a JSON object, the last one `data: [DONE]`. Other lines (comments that keep the
connection alive, names of events) mean nothing here. An event may come in many reads, and a read may have many events.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_LINE_BYTES = 16 << 20
"""A longer line is no event of a text stream."""


class Delta(msgspec.Struct, frozen=True):
    """What a chunk of a chat adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def says_something(self) -> bool:
        """Whether it is more than the role that opens a chat."""
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class Choice(msgspec.Struct, frozen=True):
    """A piece of the answer. token_ids: the new tokens, from servers that tell."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def answer_text(self) -> str:
        """What it adds to the answer (a chat's reasoning is no part of what is said back)."""
        return (self.delta.content if self.delta is not None else self.text) or ""

    @property
    def has_tokens(self) -> bool:
        """Whether at least one token came with it.

        Ids decide where the server tells them. Else every piece counts, also one without text (a token may be half a
        character), but the opening of a chat, which some servers send before there is any token.
        """
        if self.token_ids is not None:
            return bool(self.token_ids)
        return self.delta is None or self.delta.says_something or self.finish_reason is not None


class PromptDetails(msgspec.Struct, frozen=True):
    """cached_tokens: of the prompt, those that were not computed."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True):
    """An event. error: set instead of choices when the server gives up in the middle of an answer."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class MalformedStreamError(ValueError):
    """The stream is not what OpenAI's servers write; the message says where."""


class EventReader:
    """Bytes in, chunks out. done: whether the stream's last event, [DONE], has come."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> list[Chunk]:
        """The events that these bytes complete. Raises MalformedStreamError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise MalformedStreamError(f"a line of more than {MAX_LINE_BYTES} bytes")
        chunks = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if self.done:
                raise MalformedStreamError(f"an event after [DONE]: {_shown(payload)}")
            if payload == b"[DONE]":
                self.done = True
            else:
                try:
                    chunks.append(_decode(payload))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise MalformedStreamError(f"{error}: {_shown(payload)}") from None
        return chunks


_decode = msgspec.json.Decoder(Chunk).decode


def _shown(payload: bytes) -> str:
    text = payload.decode(errors="replace")
    return repr(text if len(text) <= 100 else text[:100] + "...")
