"""Whole benchmarks of a server that answers by the clock, and of one that answers wrongly.

Times: the server is never early, and a busy machine may be late, so figures are from what the clock says to LATE more. That
figures are exact is for tests/bench/test_metrics.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.conftest import Paced

from firstlight.bench.bench import Result, bench
from firstlight.bench.client import Client
from firstlight.bench.errors import BenchError
from firstlight.bench.outcome import FAILURES, Outcome
from firstlight.config import BenchOptions

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from serving import started

LATE = 0.5
"""Seconds."""
FIRST, GAP = 0.3, 0.05
Starter = Callable[[float, float], Paced]


def run(server: Paced | str, **values: Any) -> Result:
    url = server if isinstance(server, str) else server.url
    given = {"url": url, "input_tokens": 4, "output_tokens": 6, "warm_up": 0, **values}
    return asyncio.run(bench(BenchOptions.load(given, {})))


def near(seconds: float, expected: float, late: float = LATE) -> bool:
    return expected - 0.005 <= seconds <= expected + late


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_closed_loop(paced_server: Starter, endpoint: str, tmp_path: Any) -> None:
    path = tmp_path / "trace.jsonl"
    content = {"messages": [{"role": "user", "content": "a"}]} if endpoint == "chat" else {"prompt_token_ids": [1] * 4}
    path.write_text((json.dumps({**content, "output_tokens": 6}) + "\n") * 8)
    server = paced_server(FIRST, GAP)
    result = run(server, endpoint=endpoint, trace=str(path), concurrency=4)
    summary = result.summary
    assert (summary.completed, summary.failed, summary.output_tokens) == (8, 0, 48)
    assert summary.peak_running == 4
    # The role that opens a chat comes at once, and is no token.
    assert near(summary.latencies.ttft.median, FIRST)
    assert near(summary.latencies.tpot.median, GAP, 0.1)
    assert near(summary.latencies.itl.median, GAP, 0.1)
    assert summary.latencies.itl.count == 8 * 5
    assert near(summary.latencies.e2el.median, FIRST + 5 * GAP)
    assert near(summary.seconds, 2 * (FIRST + 5 * GAP), 3 * LATE)
    assert summary.total_rate == pytest.approx((summary.input_tokens + 48) / summary.seconds)
    assert summary.unlike_asked == 0


def test_what_is_asked(paced_server: Starter) -> None:
    server = paced_server(0, 0)
    result = run(
        server, requests=3, concurrency=3, temperature=0.5, return_token_ids=True, field=["top_k=20"], warm_up=2
    )
    assert len(server.bodies) == 5
    assert result.summary.completed == 3
    for body in server.bodies:
        assert len(body.pop("prompt")) == 4
        assert body == {
            "model": "paced",
            "max_tokens": 6,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_token_ids": True,
            "top_k": 20,
        }
    run(server, requests=1, ignore_eos=False)
    assert "ignore_eos" not in server.bodies[-1]
    assert "return_token_ids" not in server.bodies[-1]


def test_arrivals_do_not_wait_for_answers(paced_server: Starter, tmp_path: Any) -> None:
    path = tmp_path / "trace.jsonl"
    times = [0.0, 0.1, 0.2, 0.5]
    path.write_text("".join(json.dumps({"input_tokens": 4, "time_seconds": at}) + "\n" for at in times))
    server = paced_server(1.5, 0)
    result = run(server, trace=str(path))
    outcomes = result.run.outcomes
    assert all(near(one.sent - result.run.began, at) for one, at in zip(outcomes, times, strict=True))
    assert result.summary.peak_running == 4
    assert result.run.bound is None
    bounded = run(server, trace=str(path), concurrency=2)
    assert bounded.summary.peak_running == 2
    assert bounded.summary.sent_late >= 2
    assert near(bounded.summary.seconds, 3.0, 3 * LATE)  # two at once, twice


def test_a_rate(paced_server: Starter) -> None:
    result = run(paced_server(0.01, 0), requests=40, rate=40, output_tokens=1)
    assert near(result.summary.seconds, result.run.outcomes[-1].due - result.run.began + 0.01)  # type: ignore[operator]
    assert result.summary.late is not None
    assert result.summary.late.count == 40


def test_a_conversation_says_again_what_was_said(paced_server: Starter) -> None:
    server = paced_server(0, 0)
    result = run(server, requests=1, turns="3", output_tokens=2, think_seconds=0.2)
    prompts = [body["prompt"] for body in server.bodies]
    assert [len(prompt) for prompt in prompts] == [4, 10, 16]
    assert prompts[1][:6] == [*prompts[0], 7, 7]
    assert prompts[2][:12] == [*prompts[1], 7, 7]
    assert all(body["return_token_ids"] for body in server.bodies)
    assert [one.turn for one in result.run.outcomes] == [0, 1, 2]
    assert [one.prompt_tokens for one in result.run.outcomes] == [4, 10, 16]
    assert result.summary.seconds > 0.4
    assert len(result.summary.turns) == 3


class Words:
    """A tokenizer of words."""

    vocab_size = 100

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: Any) -> str:
        return "".join(f" w{id}" for id in ids)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_conversation_in_text(paced_server: Starter, endpoint: str) -> None:
    server = paced_server(0, 0)
    given = {"url": server.url, "requests": 1, "turns": 2, "input_tokens": 3, "output_tokens": 2, "warm_up": 0}
    result = asyncio.run(bench(BenchOptions.load({**given, "endpoint": endpoint}, {}), Words()))
    assert result.summary.completed == 2
    first, second = server.bodies
    if endpoint == "chat":
        assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
        assert second["messages"][0] == first["messages"][0]
        assert second["messages"][1]["content"] == "xx"
        assert len(second["messages"][2]["content"].split()) == 3
    else:
        assert second["prompt"].startswith(first["prompt"] + "xx w")
        assert "return_token_ids" not in second


# Answers that are none

SCRIPTS: list[tuple[str, list[list[Any]], str]] = [
    ("cut_off", [["text", "a"], ["text", "b"]], "without .DONE., after 2 chunks"),
    ("cut_off", [["text", "a"], ["break", 0]], "Payload"),
    ("malformed", [["text", "a"], ["raw", "data: {oops\n\n"]], "oops"),
    ("malformed", [["text", "a"], ["done", 0], ["text", "b"]], "after"),
    ("error_event", [["text", "a"], ["raw", 'data: {"error": {"message": "the engine died"}}\n\n']], "the engine died"),
    ("no_tokens", [["usage", {"completion_tokens": 0}], ["done", 0]], "no token"),
    ("no_tokens", [["done", 0]], "no token"),
    ("cut_off", [], "after 0 chunks"),
    ("timeout", [["text", "a"], ["sleep", 5]], "after 1 chunks"),
]


@pytest.mark.parametrize(("kind", "script", "message"), SCRIPTS)
def test_a_broken_stream_is_a_failure_of_its_kind(
    paced_server: Starter, kind: str, script: list[list[Any]], message: str
) -> None:
    fields = [f"script={json.dumps(script)}"]
    result = run(paced_server(0, 0), requests=3, concurrency=3, field=fields, timeout_seconds=0.5)
    assert result.summary.completed == 0
    assert {name: one.count for name, one in result.summary.failures.items()} == {kind: 3}
    assert kind in FAILURES
    for one in result.run.outcomes:
        assert one.failure is not None
        assert re.search(message, one.failure.message)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_an_http_error_is_a_failure_of_its_status(paced_server: Starter, status: int) -> None:
    result = run(paced_server(0, 0), requests=2, field=[f"status={status}"])
    [(kind, failure)] = result.summary.failures.items()
    assert (kind, failure.count, failure.example) == (f"http_{status}", 2, f"status {status} as asked")
    assert result.as_json()["failures"] == {kind: {"count": 2, "example": failure.example}}


def test_a_server_that_went_away_is_a_failure(paced_server: Starter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def ask() -> Outcome:
        outcome = Outcome(0, 0, 1, 1)
        async with Client(BenchOptions(url=f"http://127.0.0.1:{port}")) as client:
            await client.ask({"prompt": [1]}, outcome)
        return outcome

    outcome = asyncio.run(ask())
    assert outcome.failure is not None
    assert outcome.failure.kind == "connection"
    with pytest.raises(BenchError, match="is the server running"):
        run(f"http://127.0.0.1:{port}")


def test_after_a_failure_the_rest_of_a_conversation_is_not_sent(paced_server: Starter) -> None:
    server = paced_server(0, 0)
    result = run(server, requests=1, turns=3, field=["status=500"])
    assert len(server.bodies) == 1
    assert {kind: one.count for kind, one in result.summary.failures.items()} == {"http_500": 1, "not_sent": 2}


def test_a_conversation_of_ids_needs_ids(paced_server: Starter) -> None:
    script = [["text", "a"], ["usage", {"prompt_tokens": 4, "completion_tokens": 1}], ["done", 0]]
    result = run(paced_server(0, 0), requests=1, turns=2, field=[f"script={json.dumps(script)}"])
    assert {kind: one.count for kind, one in result.summary.failures.items()} == {"no_ids": 1, "not_sent": 1}


# Servers that tell less, or more at once


def test_several_tokens_a_chunk(paced_server: Starter) -> None:
    script = [["ids", [1, 2, 3]], ["sleep", 0.3], ["ids", [4, 5, 6]], ["done", 0]]
    result = run(paced_server(0, 0), requests=1, output_tokens=6, field=[f"script={json.dumps(script)}"])
    summary = result.summary
    assert (summary.output_tokens, summary.counted_by, summary.unlike_asked) == (6, {"token_ids": 1}, 0)
    first = summary.latencies.ttft.mean  # a gap is short by as much as the token before it was late
    assert near(first + 5 * summary.latencies.tpot.mean, 0.3)
    assert near(first + summary.latencies.itl.mean, 0.3)


def test_without_usage_chunks_are_counted_and_that_is_said(paced_server: Starter) -> None:
    script = [["text", "a"], ["text", "b"], ["done", 0]]
    result = run(paced_server(0, 0), requests=1, field=[f"script={json.dumps(script)}"])
    assert result.summary.counted_by == {"chunks": 1}
    assert (result.summary.output_tokens, result.summary.unlike_asked) == (2, 1)
    assert result.summary.input_tokens == 4  # what was sent


def test_usage_wins_and_tells_cached_tokens(paced_server: Starter) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 5}}
    script = [["text", "a"], ["text", "b"], ["usage", usage], ["done", 0]]
    summary = run(paced_server(0, 0), requests=2, field=[f"script={json.dumps(script)}"]).summary
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (18, 12, 10)
    assert summary.counted_by == {"usage": 2}


# Before the load


def test_a_failing_warm_up_stops_it_all(paced_server: Starter) -> None:
    server = paced_server(0, 0)
    with pytest.raises(BenchError, match="warm-up request failed: http_400: status 400 as asked"):
        run(server, warm_up=1, field=["status=400"])
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"served_name": "other"}, "--served-name other: the server has paced"),
        ({"field": ["top_k"]}, "--field top_k"),
        ({"field": ["top_k={"]}, "--field top_k={"),
        ({"field": ['prompt="x"']}, '--field prompt="x": .*--input-tokens and --trace'),
        ({"field": ["messages=[]"]}, "--field messages=.*--input-tokens and --trace"),
        ({"field": ["max_tokens=2"]}, "--field max_tokens=2: .*--output-tokens"),
        ({"field": ["max_completion_tokens=2"]}, "--field max_completion_tokens=2: .*--output-tokens"),
        ({"field": ["stream=false"]}, "--field stream=false: .*always streamed"),
        ({"field": ["stream_options={}"]}, "--field stream_options={}: .*always streamed"),
        ({"url": "ftp://x"}, "--url ftp://x"),
        ({"url": "http://127.0.0.1:99999"}, "Port out of range 0-65535"),
        ({"slo": ["x=1"]}, "--slo x=1"),
    ],
)
def test_wrong_options(paced_server: Starter, values: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        run(paced_server(0, 0), **values)


def test_a_cancelled_request_hangs_up(paced_server: Starter) -> None:
    server = paced_server(0.05, 0.05)

    async def ask() -> None:
        async with Client(BenchOptions(url=server.url)) as client:
            task = asyncio.create_task(client.ask({"prompt": [1]}, Outcome(0, 0, 1, 1000)))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())
    deadline = time.monotonic() + 5
    while server.left == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.left == 1


@pytest.mark.slow
def test_a_thousand_at_once_are_little_work() -> None:
    """In a process of its own, the server takes no time from the client."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("paced_server.py")),
        "--first-ms",
        "3000",
        "--gap-ms",
        "200",
    ]
    with started(command, 60) as server:
        result = run(server.url, requests=1000, concurrency=1000, output_tokens=25)
    summary = result.summary
    assert (summary.completed, summary.failed, summary.peak_running) == (1000, 0, 1000)
    chunks = 25 * 1000
    assert result.run.cpu_seconds / chunks < 200e-6  # 51 us on a busy machine, connecting included
