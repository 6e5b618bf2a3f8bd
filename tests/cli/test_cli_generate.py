"""`generate` and `chat` with the fake engine, started by the command itself or behind a server."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.fake_engine import DIES, END, VOCAB_SIZE
from server.served import TESTS, RunningServer, running, write_checkpoint

from firstlight import cli
from firstlight.cli import backend
from firstlight.cli.jsonl import FileError, OutputFile, read_lines


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "echo")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    with running({"model": str(checkpoint)}) as server:
        yield server


@pytest.fixture(params=["local", "url"])
def where(request: pytest.FixtureRequest, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that choose who answers."""
    if request.param == "url":
        return ["--url", request.getfixturevalue("server").url]
    return local(checkpoint, monkeypatch)


def local(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command starts an engine of its own; ours, for the test."""
    fake = functools.partial(backend.open_backend, engine="server.fake_engine:FakeEngine")
    monkeypatch.setattr(backend, "open_backend", fake)
    monkeypatch.setattr(backend.signal, "signal", lambda *_: None)  # pytest's handlers stay
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    return [str(checkpoint)]


def firstlight(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["firstlight", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int) or end.value.code is None
    return end.value.code or 0


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The answers, in the order of their lines."""
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda answer: answer["index"])


def test_generate(where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"prompt": "abc", "temperature": 0},
        {"id": "greeting", "messages": [{"role": "user", "content": "Grüße"}], "temperature": 0},
        "",
        {"id": 7, "prompt_token_ids": [104, 105], "temperature": 0, "return_token_ids": True},
        {"prompt": "abcdef", "max_tokens": 2, "temperature": 0},
    ]
    prompts, answers = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert firstlight(monkeypatch, "generate", *where, "-i", str(prompts), "-o", str(answers)) == 0
    first, greeting, ids, short = read(answers)
    assert first["index"] == 0
    assert first["text"] == "abc"
    assert first["finish_reason"] == "stop"
    assert first["usage"]["completion_tokens"] == 4
    assert (greeting["id"], greeting["index"], greeting["text"]) == ("greeting", 1, "Grüße")
    assert (ids["id"], ids["index"], ids["text"], ids["token_ids"]) == (7, 3, "hi", [104, 105, END])
    assert (short["index"], short["text"], short["finish_reason"]) == (4, "ab", "length")


def test_defaults_for_lines_without(where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "abcdef"}, {"prompt": "abcdef", "max_tokens": 3}])
    answers = tmp_path / "out.jsonl"
    options = ("--max-tokens", "2", "--temperature", "0", "-i", str(prompts), "-o", str(answers))
    assert firstlight(monkeypatch, "generate", *where, *options) == 0
    assert [answer["text"] for answer in read(answers)] == ["ab", "abc"]


def test_refused_lines_do_not_stop_the_others(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "{not json",
        "[]",
        {"prompt": "abc", "messages": []},
        {"id": [1], "prompt": "a"},
        {"id": "n", "prompt": "abc", "n": 2},
        {"prompt_token_ids": [VOCAB_SIZE]},
        {"prompt": ["a", "b"]},
        {"prompt": "a", "stream": True},
        {"prompt": "fine", "temperature": 0},
    ]
    prompts, answers = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert firstlight(monkeypatch, "generate", *where, "-i", str(prompts), "-o", str(answers)) == 1
    *refused, fine = read(answers)
    messages = [answer["error"]["message"] for answer in refused]
    for message, said in zip(
        messages,
        ["JSON", "object", "one of", "`id`", "`n` is not supported", "0 to 299", "must be a string", "`stream`"],
        strict=True,
    ):
        assert said in message
    assert refused[4]["id"] == "n"
    assert fine["text"] == "fine"
    assert "1 answer, 8 refused" in capsys.readouterr().err


def test_lines_that_can_not_be_sent_do_not_stop_the_others(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a surrogate pair is valid JSON and no Unicode, wherever it is; a deep line is more than a parser takes."""
    lines: list[Any] = [
        {"id": "good", "prompt": "a\U0001f600", "temperature": 0},  # a whole pair, as json.dumps writes it
        {"id": "p", "prompt": "a\ud800"},
        {"id": "e\ud800", "prompt": "a"},
        {"id": "m", "messages": [{"role": "user", "content": "\udfff"}]},
        {"id": "k", "prompt": "a", "\ud800": 1},
        '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "[" * 100_000,
        *(
            '{"chat_template_kwargs": {"x": ' + "[" * depth + "]" * depth + '}, "messages": []}'
            for depth in (300, 900, 985)
        ),
        {"prompt": "a", "temperature": float("nan")},
        {"prompt": "a", "seed": 10**400},
        {"prompt": "fine", "temperature": 0},
    ]
    prompts, answers = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert firstlight(monkeypatch, "generate", *where, "-i", str(prompts), "-o", str(answers)) == 1
    good, *refused, fine = read(answers)
    assert (good["text"], fine["text"]) == ("a\U0001f600", "fine")
    said = ["\\ud800, which is no character"] * 2 + ["\\udfff, which"] + ["\\ud800, which"] + ["within each other"] * 2
    for answer, words in zip(refused, said, strict=False):
        assert words in answer["error"]["message"]
    assert [answer.get("id") for answer in refused] == ["p", None, "m", "k"] + [None] * 7
    assert "temperature" in refused[-2]["error"]["message"]
    assert "2 answers, 11 refused" in capsys.readouterr().err


def test_generate_goes_on_where_it_stopped(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine dies half way; the answers so far stay, a torn line is cut off, and the next run does the rest."""
    arguments = local(checkpoint, monkeypatch)
    good = [{"id": f"q{number}", "prompt": f"prompt {number}", "temperature": 0} for number in range(20)]
    deadly = {"id": "deadly", "prompt_token_ids": [DIES]}
    prompts, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = ("generate", *arguments, "-i", str(prompts), "-o", str(answers), "--parallel", "1")

    write(prompts, [*good[:8], deadly, *good[8:]])
    assert firstlight(monkeypatch, *command) == 1
    assert "the engine process ended with status 9" in capsys.readouterr().err
    before = answers.read_text()
    assert [answer["id"] for answer in read(answers)] == [f"q{number}" for number in range(8)]

    answers.write_text(before + '{"index": 9, "id": "q8", "te')
    write(prompts, good)
    assert firstlight(monkeypatch, *command) == 0
    assert answers.read_text().startswith(before)
    texts = {answer["id"]: answer["text"] for answer in read(answers)}
    assert texts == {line["id"]: line["prompt"] for line in good}
    assert len(answers.read_text().splitlines()) == 20
    assert "8 answers are there already, 12 to go" in capsys.readouterr().err

    whole = answers.read_text()
    assert firstlight(monkeypatch, *command) == 0, "nothing is left to do"
    assert answers.read_text() == whole


def test_refused_lines_are_tried_again(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the next run, with the input mended or not; what has an answer is left alone."""
    prompts, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = ("generate", *where, "-i", str(prompts), "-o", str(answers), "--temperature", "0")
    good, bad = {"prompt": "good"}, {"id": "bad", "prompt": "abcdef", "n": 2}
    write(prompts, [good, bad, "{not json"])
    for _ in range(2):
        assert firstlight(monkeypatch, *command) == 1
        assert "1 answer, 2 refused" in capsys.readouterr().err
    assert len(read(answers)) == 5
    write(prompts, [good, {"id": "bad", "prompt": "mended"}, {"prompt": "mended, too"}])
    for _ in range(2):
        assert firstlight(monkeypatch, *command) == 0
        assert [answer["text"] for answer in read(answers) if "error" not in answer] == [
            "good",
            "mended",
            "mended, too",
        ]
        assert len(read(answers)) == 7


def test_the_last_line_of_a_request_counts(tmp_path: Path) -> None:
    lines = [{"index": 0, "text": "a"}, {"index": 1, "id": "x", "error": {}}, {"index": 0, "error": {}}]
    with OutputFile(write(tmp_path / "out.jsonl", [*lines, {"index": 1, "id": "x", "text": "b"}])) as out:
        assert out.done == {("id", "x")}


def test_generate_through_a_server_is_offline_work(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server.metric("firstlight_requests_total", service_class="offline", outcome="stop")
    prompts = write(tmp_path / "in.jsonl", [{"prompt": f"a{number}", "temperature": 0} for number in range(12)])
    command = ("generate", "--url", server.url, "-i", str(prompts), "-o", str(tmp_path / "out.jsonl"))
    assert firstlight(monkeypatch, *command) == 0
    assert server.metric("firstlight_requests_total", service_class="offline", outcome="stop") == before + 12


def test_nobody_at_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "a"}] * 3)
    for url, said in (
        ("http://127.0.0.1:9", "is the server running?"),
        ("ftp://x", "--url ftp://x: it must look like"),
        ("http://127.0.0.1:99999", "it must look like http://127.0.0.1:8000 (Port out of range 0-65535)"),
        ("http://127.0.0.1:-1", "it must look like"),
        ("127.0.0.1:http", "it must look like"),
        ("http://127.0.0.1:0", "ports are 1 to 65535"),
        ("http://[::1", "it must look like http://127.0.0.1:8000 (Invalid IPv6 URL)"),
        ("http://[nowhere]", "it must look like"),
        (f"http://{'a' * 64}.org", "it must look like"),
        ("http://a..b", "it must look like"),
        ("http://127.0.0.1:9/a b", "it must look like"),
        ("http://127.0.0.1:9/ä", "it must look like"),
        ("http://a b:9", "it must look like"),
    ):
        command = ("generate", "--url", url, "-i", str(prompts), "-o", str(tmp_path / "out.jsonl"))
        assert firstlight(monkeypatch, *command) == 1
        assert said in capsys.readouterr().err, url
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_the_key_is_sent_as_the_server_reads_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the line's end that a file brings along, and in UTF-8."""
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "a", "temperature": 0}])
    with running({"model": str(checkpoint)}, {"api_key": "schlüssel\n"}) as server:
        command = ("generate", "--url", server.url, "-i", str(prompts), "-o", str(tmp_path / "out.jsonl"))
        assert firstlight(monkeypatch, *command, "--api-key", "schlüssel\n") == 0
    assert [answer["text"] for answer in read(tmp_path / "out.jsonl")] == ["a"]
    write(prompts, [{"id": "another", "prompt": "a"}])
    assert firstlight(monkeypatch, *command, "--api-key", "a\nb") == 1
    assert "--api-key (or FIRSTLIGHT_API_KEY): has characters inside that a header can't" in capsys.readouterr().err


def test_files_that_can_not_be_used(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"can't read .*missing\.jsonl: No such file"):
        read_lines(tmp_path / "missing.jsonl")
    with pytest.raises(FileError, match="lines 1 and 3 have the same id 'x'"):
        read_lines(write(tmp_path / "twice.jsonl", [{"id": "x", "prompt": "a"}, "", {"id": "x", "prompt": "b"}]))
    with (
        pytest.raises(FileError, match="line 2 was not written by `generate`"),
        OutputFile(write(tmp_path / "other.jsonl", [{"index": 0}, {"name": "something else"}])),
    ):
        pass
    held, second = OutputFile(tmp_path / "out.jsonl"), OutputFile(tmp_path / "out.jsonl")
    with held, pytest.raises(FileError, match="is being written by another run"), second:
        pass
    with OutputFile(tmp_path / "out.jsonl") as out:
        assert out.done == set()


def test_chat(where: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["Hello, 世界!", "", "/help", "/clear", "x" * 600, "again", "/exit", "not read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(typed) + "\n"))
    assert firstlight(monkeypatch, "chat", *where, "--temperature", "0") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["Hello, 世界!", "again"]
    assert "16 tokens, first after" in shown.err
    assert "/clear forgets the conversation" in shown.err
    assert "refused: `messages` has" in shown.err


def test_chat_without_a_tokenizer_ends_before_the_first_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("not read\n"))
    assert firstlight(monkeypatch, "chat", *local(tmp_path, monkeypatch)) == 2
    assert capsys.readouterr().err == (
        f"firstlight: error: {tmp_path}: this checkpoint has no tokenizer: it takes token ids only, "
        "through /v1/completions with return_token_ids\n"
    )
    assert sys.stdin.read() == "not read\n"


def test_statistics_of_a_piped_chat_have_a_line_of_their_own(server: RunningServer) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "firstlight", "chat", "--url", server.url, "--temperature", "0"],
        input="hello\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "NO_COLOR": "1", "TERM": "dumb", "PYTHONUNBUFFERED": ""},
        text=True,
        timeout=60,
    )
    answer, statistics = done.stdout.splitlines()
    assert answer == "hello"
    assert "tokens, first after" in statistics


def test_chat_keeps_the_conversation(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("second\nthird\n"))
    command = ("chat", "--url", server.url, "--system", "first", "--temperature", "0", "--max-tokens", "3")
    assert firstlight(monkeypatch, *command) == 0
    assert capsys.readouterr().out.splitlines() == ["fi", "fi"], "the echo begins with the system message"


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "firstlight", "chat", "--url", "http://127.0.0.1:9"],
        input="hi\n",
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("firstlight: error: no answer from 127.0.0.1:9")
