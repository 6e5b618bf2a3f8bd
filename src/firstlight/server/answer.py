"""From tokens to what the client sees: text piece by piece, cut at the first stop string.

A stop string may be spread over several tokens, so text that could still become one is held back until it is clear.
With stop strings, tokens are looked at one by one: where the answer ends, and how many tokens it has, then doesn't
depend on how many of them arrived at once, which is what makes streamed and whole answers equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from firstlight.scheduling.sampling import FinishReason


class TextDecoder(Protocol):
    """Incremental detokenising: what `weights.tokenizer.TextStream` does."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; bytes of an unfinished character wait for the next call."""

    def flush(self) -> str:
        """What is left at the end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of the answer to one prompt.

    index: which prompt of the request. text: None when the checkpoint has no tokenizer.
    finish_reason: set in the last piece.
    """

    index: int
    text: str | None
    tokens: list[int]
    finish_reason: FinishReason | None = None


def joined(pieces: Sequence[Piece]) -> Piece:
    """All the pieces of one answer, in order, as one."""
    texts = [piece.text for piece in pieces if piece.text is not None]
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece(pieces[0].index, "".join(texts) if texts else None, tokens, pieces[-1].finish_reason)


class Answer:
    """The answer to one prompt, in the making.

    decoder: None when the checkpoint has no tokenizer; then there are no stop strings either.
    stop_token_ids: the one that ends an answer counts as generated, and isn't shown as text.
    """

    def __init__(
        self, index: int, decoder: TextDecoder | None, stop_strings: Sequence[str], stop_token_ids: Sequence[int]
    ) -> None:
        self.index = index
        self.token_count = 0
        self.finish_reason: FinishReason | None = None
        self._decoder = decoder
        self._stop_strings = tuple(stop_strings)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._held = ""

    @property
    def finished(self) -> bool:
        """Whether the last piece has been made."""
        return self.finish_reason is not None

    def push(self, tokens: list[int], finish_reason: FinishReason | None) -> Piece:
        """The next tokens, and why the engine ended the request if it did; what of it is to be shown.

        After a piece with a finish reason the answer is finished, and must not be pushed to; if the engine has not
        ended the request by itself, a stop string was found and the request should be aborted.
        """
        if self._decoder is None:
            return self._piece(None, tokens, finish_reason)
        if not self._stop_strings:
            text = self._decoder.push(self._shown(tokens, finish_reason))
            if finish_reason is not None:
                text += self._decoder.flush()
            return self._piece(text, tokens, finish_reason)

        text = ""
        for count, token in enumerate(tokens, 1):
            reason = finish_reason if count == len(tokens) else None
            new_text, stopped = self._until_stop(self._decoder.push(self._shown([token], reason)))
            text += new_text
            if stopped:
                return self._piece(text, tokens[:count], FinishReason.STOP)
        if finish_reason is not None:
            new_text, stopped = self._until_stop(self._decoder.flush())
            text += new_text
            if stopped:
                finish_reason = FinishReason.STOP
            else:
                text += self._held
        return self._piece(text, tokens, finish_reason)

    def _shown(self, tokens: list[int], finish_reason: FinishReason | None) -> list[int]:
        """The tokens without the stop token at their end."""
        ends_by_token = finish_reason is FinishReason.STOP and tokens and tokens[-1] in self._stop_token_ids
        return tokens[:-1] if ends_by_token else tokens

    def _until_stop(self, new_text: str) -> tuple[str, bool]:
        """Add text; returns what of the text held so far is now certain, and whether a stop string was found after
        it."""
        text = self._held + new_text
        found = [at for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stop_strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _piece(self, text: str | None, tokens: list[int], finish_reason: FinishReason | None) -> Piece:
        self.token_count += len(tokens)
        self.finish_reason = finish_reason
        return Piece(self.index, text, tokens, finish_reason)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
