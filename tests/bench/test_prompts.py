"""Loads: lengths, prefixes, conversations, traces, arrivals; all by the seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from firstlight.bench.arrivals import arrival_times
from firstlight.bench.bench import _vocabulary
from firstlight.bench.errors import BenchError
from firstlight.bench.prompts import (
    ARRIVALS,
    LENGTHS,
    PREFIXES,
    TOKENS,
    TURNS,
    WARM_UP,
    Session,
    generator,
    make_sessions,
    make_warm_up,
)
from firstlight.bench.trace import read_trace
from firstlight.cli.options import error_lines
from firstlight.config import BenchOptions, Span

VOCABULARY = Span(5, 99)


class Letters:
    """A tokenizer with a merge: `ab` is one token, every other character is one. Ids 0 to 25 are letters, 26 is `ab`,
    27 is none and vanishes; it puts token 28 before each text."""

    vocab_size = 29

    def encode(self, text: str) -> list[int]:
        ids = [28]
        while text:
            size = 2 if text.startswith("ab") else 1
            ids.append(26 if size == 2 else ord(text[0]) - ord("a"))
            text = text[size:]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("ab" if id == 26 else chr(ord("a") + id) if id < 26 else "" for id in ids)


def options(**values: Any) -> BenchOptions:
    return BenchOptions.load(values, {})


def sessions(**values: Any) -> list[Session]:
    return make_sessions(options(**values), None, None, VOCABULARY)


def ids(session: Session, turn: int = 0) -> list[int]:
    prompt = session.turns[turn].prompt
    assert isinstance(prompt, np.ndarray)
    return [int(id) for id in prompt]


def test_lengths_are_exact_and_ids_in_range() -> None:
    made = sessions(requests=200, input_tokens="3-7", output_tokens="2-4")
    assert {len(ids(one)) for one in made} == {3, 4, 5, 6, 7}
    assert {one.turns[0].output_tokens for one in made} == {2, 3, 4}
    assert all(len(ids(one)) == one.turns[0].input_tokens for one in made)
    every = [id for one in made for id in ids(one)]
    assert (min(every), max(every)) == (5, 99)
    assert all(one.due is None for one in made)


def test_the_seed_decides_all_and_each_purpose_draws_for_itself() -> None:
    def prompts(**more: Any) -> list[list[int]]:
        return [ids(one) for one in sessions(requests=5, input_tokens="3-7", **more)]

    assert prompts() == prompts() == prompts(output_tokens="128") == prompts(rate=3)
    assert prompts() != prompts(seed=1)
    purposes = (LENGTHS, TOKENS, PREFIXES, ARRIVALS, TURNS, WARM_UP)
    assert len({generator(0, purpose).random() for purpose in purposes}) == len(purposes)
    assert prompts()[:3] == [ids(one) for one in sessions(requests=3, input_tokens="3-7")]


@pytest.mark.parametrize(
    ("values", "count"),
    [({}, 4), ({"concurrency": 8}, 32), ({"rate": 5}, 100), ({"requests": 7, "concurrency": 8}, 7)],
)
def test_number_of_requests(values: dict[str, Any], count: int) -> None:
    assert len(sessions(**values, input_tokens=1)) == count


def test_prefixes_are_shared_in_a_group_and_nowhere_else() -> None:
    made = sessions(requests=30, prefix_tokens=20, prefix_groups=3, input_tokens=5)
    groups: dict[tuple[int, ...], int] = {}
    for one in made:
        assert len(ids(one)) == one.turns[0].input_tokens == 25
        groups[tuple(ids(one)[:20])] = groups.get(tuple(ids(one)[:20]), 0) + 1
    assert sorted(groups.values()) == [10, 10, 10]
    assert len({tuple(ids(one)[20:]) for one in made}) == 30


def test_conversations_have_turns_and_a_prefix_in_the_first() -> None:
    made = sessions(requests=40, turns="1-3", prefix_tokens=10, input_tokens=4)
    assert {len(one.turns) for one in made} == {1, 2, 3}
    assert all(turn.input_tokens == (14 if number == 0 else 4) for one in made for number, turn in enumerate(one.turns))


@pytest.mark.parametrize("prefix_tokens", [0, 6])
def test_texts_have_the_length_asked_for(prefix_tokens: int) -> None:
    codec = Letters()
    given = options(requests=50, input_tokens="8-12", prefix_tokens=prefix_tokens)
    made = make_sessions(given, None, codec, Span(0, 28))
    lengths = []
    for one in made:
        text = one.turns[0].prompt
        assert isinstance(text, str)
        assert len(codec.encode(text)) == one.turns[0].input_tokens
        lengths.append(one.turns[0].input_tokens - prefix_tokens)
    assert set(lengths) == {8, 9, 10, 11, 12}


def test_chats_are_messages_and_need_a_tokenizer() -> None:
    [one] = make_sessions(options(requests=1, endpoint="chat", input_tokens=9), None, Letters(), Span(0, 28))
    [message] = one.turns[0].prompt
    assert isinstance(message, dict)
    assert message["role"] == "user"
    assert len(Letters().encode(message["content"])) == 9
    with pytest.raises(BenchError, match="--tokenizer"):
        sessions(endpoint="chat")


def test_an_unknown_vocabulary_is_an_error_with_a_way_out() -> None:
    with pytest.raises(BenchError, match="--token-range"):
        make_sessions(options(), None, None, None)


@pytest.mark.parametrize(
    ("name", "most", "beyond"),
    [
        ("token_range", "0-2147483647", "0-5000000000"),
        ("input_tokens", "16777216", "9999999999999"),
        ("output_tokens", "1-16777216", "1-16777217"),
        ("prefix_tokens", "16777216", "9999999999999"),
        ("requests", "10000000", "99999999999999"),
        ("warm_up", "10000000", "99999999999999"),
        ("prefix_groups", "10000000", "10000000000000"),
        ("turns", "1-10000000", "1-99999999999999"),
        ("timeout_seconds", "1e9", "inf"),
        ("think_seconds", "1e9", "inf"),
        ("rate", "1e9", "nan"),
        ("burstiness", "1e9", "inf"),
        ("temperature", "2", "nan"),
    ],
)
def test_numbers_beyond_what_can_be_made_are_refused_by_option(name: str, most: str, beyond: str) -> None:
    options(**{name: most})
    with pytest.raises(ValidationError) as caught:
        options(**{name: beyond})
    [line] = error_lines(caught.value)
    assert line.startswith(f"--{name.replace('_', '-')} (or ")
    assert line.endswith(f"it is {beyond!r}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"requests": 10**7, "turns": "1-2"}, "--turns 1-2: with 10000000 conversations up to 20000000 requests"),
        ({"requests": 10**6, "input_tokens": "5000"}, "--input-tokens 5000: .* up to 5000000000 tokens in all"),
        ({"requests": 1, "prefix_tokens": 10**4, "prefix_groups": 10**6}, "--prefix-tokens 10000 of 1000000 groups"),
        ({"requests": 1, "rate": 1e-320}, "--rate 1e-320 --burstiness 1.0: .* too small"),
        ({"requests": 1, "rate": 1e-200, "burstiness": 1e-200}, "--rate 1e-200 --burstiness 1e-200: .* too small"),
    ],
)
def test_loads_that_are_too_large_only_in_all_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        sessions(**values)


def test_traces_that_are_too_large_only_in_all_are_refused(tmp_path: Path) -> None:
    lines = read_trace(trace(tmp_path, *[{"input_tokens": 2**24}] * 257))
    with pytest.raises(BenchError, match=r"--trace x.jsonl: the `input_tokens` of 257 lines are 4311744512 in all"):
        make_sessions(options(trace="x.jsonl"), lines, None, VOCABULARY)


@pytest.mark.parametrize("size", [0, "many", 10**12])
def test_a_vocabulary_that_a_server_cannot_have_is_an_error(size: Any) -> None:
    assert _vocabulary(options(), None, {"vocab_size": 2**31}) == Span(0, 2**31 - 1)
    with pytest.raises(BenchError, match=f"its vocabulary has {size!r} tokens; give --token-range"):
        _vocabulary(options(), None, {"vocab_size": size})


def test_a_range_beyond_the_tokenizers_ids_costs_nothing() -> None:
    [one] = make_sessions(options(requests=1, input_tokens=9), None, Letters(), Span(0, 2**31 - 1))
    assert isinstance(one.turns[0].prompt, str)
    assert len(Letters().encode(one.turns[0].prompt)) == 9


def test_warm_up_prompts_are_none_of_the_load() -> None:
    given = options(requests=5, warm_up=5, input_tokens=30, turns="2", prefix_tokens=10)
    warm = make_warm_up(given, None, None, VOCABULARY)
    assert len(warm) == 5
    assert all(len(one.turns) == 1 for one in warm)
    firsts = {tuple(ids(one)[:10]) for one in make_sessions(given, None, None, VOCABULARY)}
    assert not firsts & {tuple(ids(one)[:10]) for one in warm}


# Arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals_have_the_rate_and_the_shape(burstiness: float) -> None:
    times = arrival_times(20000, rate=50, burstiness=burstiness, rng=generator(0, 0))
    gaps = np.diff([0.0, *times])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_rate_gives_every_session_its_time() -> None:
    due = [one.due for one in sessions(requests=50, rate=10)]
    assert due == sorted(due)  # type: ignore[type-var]
    assert due == [one.due for one in sessions(requests=50, rate=10, input_tokens=9)]


# Traces


def trace(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_says_what_and_when(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        {"time_seconds": 2.5, "input_tokens": 6, "output_tokens": 3},
        "",
        {"time_seconds": 0, "prompt_token_ids": [1, 2, 3], "output_tokens": 5},
        {"time_seconds": 1, "prompt": "hello"},
    )
    made = make_sessions(options(output_tokens=9), read_trace(path), None, VOCABULARY)
    assert [one.due for one in made] == [0, 1, 2.5]
    assert ids(made[0]) == [1, 2, 3]
    assert made[1].turns[0].prompt == "hello"
    assert len(ids(made[2])) == 6
    assert [one.turns[0].output_tokens for one in made] == [5, 9, 3]
    assert len(read_trace(path, limit=2)) == 2


def test_a_trace_without_times_goes_by_the_options(tmp_path: Path) -> None:
    lines = read_trace(trace(tmp_path, *[{"input_tokens": 4}] * 5))
    assert [one.due for one in make_sessions(options(), lines, None, VOCABULARY)] == [None] * 5
    assert all(one.due for one in make_sessions(options(rate=5), lines, None, VOCABULARY))
    assert len(make_sessions(options(requests=3), lines, None, VOCABULARY)) == 3
    assert len(make_sessions(options(requests=9), lines, None, VOCABULARY)) == 5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{oops"], "line 1: JSON"),
        ([{"input_tokens": 4}, {"input_tokens": 0}], "line 2: .*>= 1"),
        ([{"output_tokens": 4}], "exactly one of .* none"),
        ([{"prompt": "a", "input_tokens": 4}], "it has prompt, input_tokens"),
        ([{"input_tokens": 4, "time": 3}], "unknown field `time`"),
        ([{"input_tokens": 4, "time_seconds": 3}, {"input_tokens": 4}], "1 of 2 lines"),
        ([""], "no line"),
        ([{"prompt_token_ids": []}], "length >= 1"),
        ([{"prompt_token_ids": [2**31 - 1]}, {"prompt_token_ids": [3_000_000_000]}], "line 2: .*<= 2147483647"),
        ([{"prompt_token_ids": [10**30]}], "line 1: "),
        ([{"input_tokens": 9_999_999_999_999}], "line 1: .*<= 16777216"),
        ([{"input_tokens": 4, "output_tokens": 10**30}], "line 1: "),
    ],
)
def test_wrong_traces_are_refused_by_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        read_trace(trace(tmp_path, *lines))


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize(
    ("values", "line", "message"),
    [
        ({"turns": "2"}, {"input_tokens": 4}, "--turns"),
        ({"rate": 3}, {"input_tokens": 4, "time_seconds": 1}, "--rate 3"),
        ({"endpoint": "chat"}, {"prompt": "a"}, "--endpoint chat"),
        ({}, {"messages": [{"role": "user", "content": "a"}]}, "--endpoint completions"),
    ],
)
def test_what_does_not_go_with_a_trace(tmp_path: Path, values: dict[str, Any], line: Any, message: str) -> None:
    lines = read_trace(trace(tmp_path, line))
    with pytest.raises(BenchError, match=message):
        make_sessions(options(**values), lines, None, VOCABULARY)
