"""benchmarks/served.py on a tiny model: the closed loops, what fits, and a long prompt beside short ones."""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import served as subject  # noqa: E402
from serving import Server, ServerError, firstlight_server, started  # noqa: E402

from firstlight.bench.outcome import Outcome  # noqa: E402

CONFIG = str(ROOT / "tests" / "tiny_configs" / "qwen3_5_text.json")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = [CONFIG, "--weights", "random", "--device", "cpu", "--threads", "1", "--max-context", "2048"]
    options += ["--max-running", "5", "--cache-gib", "0.05", "--no-prefix-cache", "--step-tokens", "64"]
    with firstlight_server(options) as server:
        yield server


def test_a_closed_loop_has_the_tokens_asked_for(server: Server) -> None:
    report = subject.closed_loop(server, at_once=3, input_tokens=50, output_tokens=10, requests=6)
    assert (report["completed"], report["failed"]) == (6, 0)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (300, 60)
    assert report["total_token_throughput"] == pytest.approx(360 / report["duration"])
    assert report["tokens_counted_by"] == {"usage": 6}
    assert report["max_concurrent_requests"] == 3
    assert report["cached_input_tokens"] == 0
    assert subject.table([report]).splitlines()[-1].startswith("| 3 | 6 | 0 | ")


def test_what_fits(server: Server) -> None:
    pages = server.metrics()["firstlight_pages_capacity"]
    slots = server.metrics()["firstlight_slots_capacity"]
    assert subject.fitting(server, 100, max_running=10**6) == min(pages // 7, slots)
    assert subject.fitting(server, int(pages) * 8, max_running=10**6) == 2
    assert subject.fitting(server, 100, max_running=4) == 4
    assert subject.fitting(server, int(pages) * 100, max_running=4) == 1


def test_long_beside_short(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "QUIET_SECONDS", 0.2)
    found = asyncio.run(subject.long_beside_short(server, short=4, short_prompt=16, long_prompt=1500, seed=0))
    assert found["long_ttft_beside_ms"] > 0
    assert found["short_itl_p50_without_ms"] > 0
    # While the long prompt is computed in chunks, each token of the others waits for a chunk.
    assert found["short_itl_p50_with_ms"] > found["short_itl_p50_without_ms"]
    assert found["short_itl_max_with_ms"] < found["long_ttft_beside_ms"]
    aborted = 'firstlight_requests_total{outcome="abort",service_class="online"}'
    deadline = time.monotonic() + 10
    while server.metrics()[aborted] < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.metrics()[aborted] == 4  # the short ones were hung up on


def test_gaps_are_those_that_end_in_the_window() -> None:
    one = Outcome(0, 0, 1, 9, chunk_times=array("d", [1.0, 2.0, 4.0, 5.5]))
    assert list(subject._gaps([one, one], 2.5, 5.0)) == [2.0, 2.0]


def test_a_server_that_does_not_start_tells_why() -> None:
    with (
        pytest.raises(ServerError, match=r"ended:\n.*no such"),
        started([sys.executable, "-c", "import sys; sys.exit('no such model')"], 30),
    ):
        pass
