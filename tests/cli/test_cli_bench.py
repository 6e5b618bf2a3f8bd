"""`firstlight bench` as a user meets it, on our own server with the fake engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.served import RunningServer, running, write_checkpoint

VOCABULARY = 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "echo")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    with running({"model": str(checkpoint)}) as server:
        yield server


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "firstlight", "bench", *arguments],
        env={**os.environ, "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_ids_of_exact_lengths_and_a_report(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = ["--concurrency", "3", "--requests", "9", "--input-tokens", "20-40", "--output-tokens", "5-9"]
    # Ids below the fake engine's special ones.
    done = bench(
        "--url",
        server.url,
        *arguments,
        "--token-range",
        "0-255",
        "--slo",
        "ttft=60000",
        "--json",
        str(path),
        "--details",
    )
    assert done.returncode == 0, done.stderr
    assert "answered requests" in done.stdout
    assert "TTFT" in done.stdout
    report = json.loads(path.read_text())
    assert (report["completed"], report["failed"], report["model_id"]) == (9, 0, "echo")
    assert report["total_output_tokens"] == sum(report["output_lens"])
    assert all(20 <= length <= 40 for length in report["input_lens"])
    assert report["output_tokens_unlike_asked"] == 0
    assert report["tokens_counted_by"] == {"usage": 9}
    assert report["request_goodput"] == pytest.approx(report["request_throughput"])
    assert report["options"]["input_tokens"] == "20-40"
    assert report["max_concurrency"] == 3


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_text_through_a_tokenizer(server: RunningServer, checkpoint: Path, endpoint: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = ["--tokenizer", str(checkpoint), "--endpoint", endpoint, "--requests", "3", "--input-tokens", "30"]
    done = bench(
        "--url", server.url, *arguments, "--output-tokens", "4", "--turns", "2", "--json", str(path), "--details"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["completed"] == 6
    assert report["backend"] == ("openai-chat" if endpoint == "chat" else "openai")
    if endpoint == "completions":
        assert report["input_lens"][0::2] == [30] * 3  # as the server counts them


def test_the_vocabulary_is_the_servers(server: RunningServer) -> None:
    assert server.get("/v1/models").json()["data"][0]["vocab_size"] == VOCABULARY


def test_failures_end_with_status_1_and_are_shown(server: RunningServer) -> None:
    done = bench(
        "--url", server.url, "--requests", "2", "--warm-up", "0", "--token-range", "262-262", "--input-tokens", "5"
    )
    assert done.returncode == 1
    assert "http_400" in done.stdout
    assert "needs 900 pages" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "is the server running?"),
        (["--input-tokens", "many"], 2, "--input-tokens (or FIRSTLIGHT_INPUT_TOKENS)"),
        (["--slo", "ttft"], 1, "--slo"),
        (["--trace", "nowhere.jsonl"], 1, "nowhere.jsonl: No such file"),
        (["--tokenizer", "nowhere"], 1, "nowhere"),
        (["--json", "/nowhere/x.json"], 1, "--json /nowhere/x.json: there is no folder /nowhere"),
        (["--json", "/"], 1, "--json /: this is a directory"),
        (["--details"], 1, "give --json"),
    ],
)
def test_mistakes_are_explained_in_a_line(arguments: list[str], status: int, message: str) -> None:
    done = bench(*arguments)
    assert done.returncode == status
    assert message in done.stderr
    [line] = done.stderr.splitlines()  # no progress bar before it
    assert line.startswith("firstlight: error:")
