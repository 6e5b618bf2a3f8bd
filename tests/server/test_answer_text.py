"""Text from tokens, stop strings included: how many tokens arrive at once must not matter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.scheduling.sampling import FinishReason
from firstlight.server.answer import Answer, joined

END = 0
TOKENS = ["", "a", "b", "ab", "ba", "aab", "é", "\u4e16"]  # token ids are positions; END has no text


class Decoder:
    """Holds each token's text back until the next call, as a real one does with half a character."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, ids: Sequence[int]) -> str:
        text = self.held + "".join(TOKENS[token] for token in ids[:-1])
        self.held = TOKENS[ids[-1]] if ids else self.held
        return text if ids else ""

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def answer(
    batches: Sequence[list[int]], stop: Sequence[str], reason: FinishReason
) -> tuple[str | None, list[int], str]:
    """Text, tokens and reason of an answer whose tokens come in these batches."""
    making = Answer(0, Decoder(), stop, [END])
    pieces = []
    for number, batch in enumerate(batches):
        pieces.append(making.push(batch, reason if number == len(batches) - 1 else None))
        if making.finished:
            break
    whole = joined(pieces)
    assert making.token_count == len(whole.tokens)
    assert whole.finish_reason is not None
    return whole.text, whole.tokens, whole.finish_reason


tokens = st.lists(st.integers(1, len(TOKENS) - 1), min_size=1, max_size=12)
stops = st.lists(st.text("ab\u00e9", min_size=1, max_size=3), max_size=3)
cuts = st.lists(st.integers(0, 12), max_size=4)


@given(tokens=tokens, stop=stops, cuts=cuts, ended=st.booleans())
def test_batches_do_not_matter(tokens: list[int], stop: list[str], cuts: list[int], ended: bool) -> None:
    tokens = [*tokens, END] if ended else tokens
    reason = FinishReason.STOP if ended else FinishReason.LENGTH
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    batches = [tokens[begin:end] for begin, end in itertools.pairwise(edges)]
    assert answer(batches, stop, reason) == answer([tokens], stop, reason)


@given(tokens=tokens, stop=stops)
def test_the_text_ends_before_the_first_stop_string(tokens: list[int], stop: list[str]) -> None:
    text, kept, reason = answer([[token] for token in tokens], stop, FinishReason.LENGTH)
    everything = "".join(TOKENS[token] for token in tokens)
    assert text is not None
    assert everything.startswith(text)
    assert not any(each in text for each in stop)
    if any(each in everything for each in stop):
        assert reason == FinishReason.STOP
        rest = everything[len(text) :]
        assert any(rest.startswith(each) for each in stop)
        shown = "".join(TOKENS[token] for token in kept)
        assert len(shown) > len(text), "the tokens that made the stop string count"
    else:
        assert (text, kept, reason) == (everything, tokens, FinishReason.LENGTH)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    class Plain(Decoder):
        def push(self, ids: Sequence[int]) -> str:
            return "".join(TOKENS[token] for token in ids)

    making = Answer(0, Plain(), ["aba"], [END])
    assert [making.push([token], None).text for token in (1, 2, 2, 1)] == ["", "", "abb", ""]
    last = making.push([END], FinishReason.STOP)
    assert (last.text, last.tokens, last.finish_reason) == ("a", [END], FinishReason.STOP)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_without_a_tokenizer_there_is_no_text(reason: FinishReason) -> None:
    making = Answer(3, None, [], [END])
    assert making.push([5, 6], None).text is None
    piece = making.push([END], reason)
    assert (piece.index, piece.text, piece.tokens, piece.finish_reason) == (3, None, [END], reason)
