"""Reading streams: however they are cut, whatever they bring."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.bench.stream import Chunk, EventReader, MalformedStreamError

EVENTS = [
    {"choices": [{"index": 0, "text": "Grüße\n", "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "", "token_ids": [1, 2], "finish_reason": "length"}], "unknown": [1]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}},
]


def stream(end: str) -> bytes:
    lines = [": ping", "", "event: x", *(f"data: {json.dumps(event, ensure_ascii=False)}" for event in EVENTS)]
    return (f"{end}{end}".join([*lines, "data: [DONE]"]) + 2 * end).encode()


@given(cuts=st.lists(st.integers(0, 600), max_size=20), end=st.sampled_from(["\n", "\r\n"]))
def test_a_stream_is_the_same_however_it_is_cut(cuts: list[int], end: str) -> None:
    data = stream(end)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader = EventReader()
    chunks: list[Chunk] = []
    for begin, after in itertools.pairwise(places):
        assert not reader.done or begin >= len(data) - len(end) * 2
        chunks += reader.feed(data[begin:after])
    assert reader.done
    texts = [choice.text for chunk in chunks for choice in chunk.choices or ()]
    assert texts == ["Grüße\n", ""]
    assert chunks[1].choices is not None
    assert chunks[1].choices[0].token_ids == [1, 2]
    assert chunks[2].usage is not None
    assert chunks[2].usage.completion_tokens == 2


@pytest.mark.parametrize(
    "data",
    [
        b"data: {not json}\n",
        b"data: [1]\n",
        b'data: {"choices": 5}\n',
        b'data: {"usage": {"prompt_tokens": "5"}}\n',
        b"data: \xff\n",
    ],
)
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedStreamError):
        EventReader().feed(data)


def test_the_blank_after_the_colon_may_be_missing() -> None:
    reader = EventReader()
    [chunk] = reader.feed(b'data:{"choices": [{"text": "a"}]}\n\ndata:[DONE]\n\n')
    assert chunk.choices is not None
    assert chunk.choices[0].text == "a"
    assert reader.done


def test_an_event_after_the_end_is_refused() -> None:
    with pytest.raises(MalformedStreamError, match="after"):
        EventReader().feed(b"data: [DONE]\n\ndata: {}\n\n")


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.bench.stream.MAX_LINE_BYTES", 10)
    with pytest.raises(MalformedStreamError, match="10 bytes"):
        EventReader().feed(b"data: 12345")


@pytest.mark.parametrize(
    ("choice", "has_tokens"),
    [
        ({"text": "a"}, True),
        ({"text": ""}, True),  # half a character
        ({"text": "", "token_ids": []}, False),
        ({"text": "", "token_ids": [5]}, True),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"reasoning_content": "a"}}, True),
        ({"delta": {}, "finish_reason": "stop"}, True),  # the stop token, which has no text
    ],
)
def test_which_chunks_have_tokens(choice: dict[str, object], has_tokens: bool) -> None:
    [chunk] = EventReader().feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    assert chunk.choices is not None
    assert chunk.choices[0].has_tokens is has_tokens
