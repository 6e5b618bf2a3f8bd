"""What became of one request: times as they were noted, token counts as the server gave them.

Times are of `time.perf_counter`, in seconds.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

CountedBy = Literal["usage", "token_ids", "chunks"]

FAILURES = {
    "connection": "no connection, or it broke before an answer began",
    "http_STATUS": "an answer with that HTTP status instead of 200",
    "timeout": "no end within --timeout-seconds",
    "cut_off": "the stream ended, or broke, before its last event",
    "malformed": "the stream was not what OpenAI's servers write",
    "error_event": "the server gave up in the middle, and said so",
    "no_tokens": "a whole answer without a token in it",
    "no_ids": "an answer without its token ids, in a conversation of ids, which says them again (give --tokenizer)",
    "not_sent": "a later turn of a conversation, one of whose answers failed",
}
"""Kinds of failures. STATUS stands for a number."""


@dataclass(frozen=True, slots=True)
class Failure:
    """kind: one of FAILURES. message: what the server or the connection said."""

    kind: str
    message: str


@dataclass(slots=True)
class Outcome:
    """A request and its answer.

    session, turn: from 0. asked_input: tokens of its prompt, as far as the client knows; asked_output: `max_tokens`.
    due: when it was to be sent; None in a closed loop. sent: just before the first byte went out.
    chunk_times: when each chunk with a token came. ended: when the last piece of the answer came.
    input_tokens, output_tokens, cached_tokens: by `usage`; None where the server didn't say.
    told_ids: tokens whose ids came; None from a server that doesn't tell ids.
    answer, answer_ids: kept only for conversations, which say them again.
    """

    session: int
    turn: int
    asked_input: int
    asked_output: int
    due: float | None = None
    sent: float = 0.0
    chunk_times: array[float] = field(default_factory=lambda: array("d"))
    ended: float = 0.0
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    told_ids: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    answer: str = ""
    answer_ids: list[int] = field(default_factory=list)

    @property
    def counted_by(self) -> CountedBy:
        """What the number of generated tokens rests on; `chunks` is a guess, as a chunk may have several tokens."""
        if self.output_tokens is not None:
            return "usage"
        return "chunks" if self.told_ids is None else "token_ids"

    @property
    def generated(self) -> int:
        """Tokens of the answer, by the best count there is."""
        if self.output_tokens is not None:
            return self.output_tokens
        return len(self.chunk_times) if self.told_ids is None else self.told_ids

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt: the server's count if it gave one."""
        return self.asked_input if self.input_tokens is None else self.input_tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunk_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for answers of one token."""
        return (self.ended - self.chunk_times[0]) / (self.generated - 1) if self.generated > 1 else None
