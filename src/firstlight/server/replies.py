"""The bodies of answers: OpenAI's objects, whole or as chunks of a stream. Chat and completions differ in shape
alone."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from firstlight.server.answer import Piece
from firstlight.server.run import Usage


class Reply:
    """What the replies to one request share. Subclasses know how a choice looks."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, *, token_ids: bool, include_usage: bool) -> None:
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._token_ids = token_ids
        self._include_usage = include_usage

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The answer in one object. pieces: one for each prompt, each with a finish reason."""
        choices = [self._with_ids(self._choice(piece), piece) for piece in pieces]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage_object(usage)}

    def first_chunks(self, count: int) -> list[dict[str, Any]]:
        """Chunks that come before any text. count: number of choices."""
        return []

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """A chunk with this piece; None when there is nothing to tell yet, such as half a character."""
        if not piece.text and piece.finish_reason is None and not (self._token_ids and piece.tokens):
            return None
        return self._chunk([self._with_ids(self._chunk_choice(piece), piece)])

    def last_chunks(self, usage: Usage) -> list[dict[str, Any]]:
        """Chunks that come after all choices are finished."""
        if not self._include_usage:
            return []
        return [{**self._chunk([]), "usage": usage_object(usage)}]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _with_ids(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        return {**choice, "token_ids": piece.tokens} if self._token_ids else choice

    def _choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class CompletionReply(Reply):
    """Of /v1/completions."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason}

    _chunk_choice = _choice


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunks(self, count: int) -> list[dict[str, Any]]:
        return [self._chunk([_delta(index, {"role": "assistant", "content": ""}, None)]) for index in range(count)]

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message, "logprobs": None, "finish_reason": piece.finish_reason}

    def _chunk_choice(self, piece: Piece) -> dict[str, Any]:
        return _delta(piece.index, {"content": piece.text} if piece.text else {}, piece.finish_reason)


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts as OpenAI gives them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
