"""Turning a stream of token ids into a stream of text.

A token need not be whole characters: an emoji may be spread over three tokens, and a token may end within one. A stream
holds back what isn't complete yet, so that the pieces it gives, joined, are exactly the text that decoding all ids at
once gives, and no piece has half a character.

For byte-level vocabularies (GPT-2's kind: Llama 3, Qwen, SmolLM) every token is a known string of bytes, and an
incremental UTF-8 decoder is all that is needed: constant work a token. For other vocabularies a token's text depends on
its neighbours; there a window of the latest tokens is decoded again until its text can't change any more.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"


class IncrementalText:
    """Token ids in, text out, bit by bit."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that is complete with these ids and was not given before; may be empty."""
        raise NotImplementedError

    def flush(self) -> str:
        """The text held back, with U+FFFD for incomplete characters. It is as new afterwards."""
        raise NotImplementedError


class ByteLevelText(IncrementalText):
    """For byte-level vocabularies. token_bytes: an id's bytes (empty for an id that isn't to be shown)."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """See IncrementalText."""
        return self._decoder.decode(b"".join(map(self._token_bytes, ids)))

    def flush(self) -> str:
        """See IncrementalText."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class WindowText(IncrementalText):
    """For vocabularies in which a token's text depends on its neighbours.

    decode: the text of some ids. continues: whether an id's text can change with the ids after it (a token that is a
    single byte). After `window` such tokens in a row the text is given as it stands, so work a token stays bounded.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], continues: Callable[[int], bool], window: int = 64
    ) -> None:
        self._decode = decode
        self._continues = continues
        self._window = window
        self._ids: list[int] = []  # the ids of the last piece given, as context, then those not given yet
        self._context = 0  # how many of them are context
        self._context_text = ""

    def push(self, ids: Iterable[int]) -> str:
        """See IncrementalText."""
        return "".join(map(self._push_one, ids))

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        waiting = len(self._ids) - self._context
        if waiting < self._window and self._continues(token):
            return ""
        text = self._decode(self._ids)
        if waiting < self._window and (text.endswith(REPLACEMENT) or len(text) <= len(self._context_text)):
            return ""
        return self._give(text)

    def _give(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        self._context_text = self._decode(self._ids)
        return piece

    def flush(self) -> str:
        """See IncrementalText."""
        piece = self._decode(self._ids)[len(self._context_text) :]
        self._ids, self._context, self._context_text = [], 0, ""
        return piece
