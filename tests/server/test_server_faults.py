"""Clients that leave, engines that die, queues that are full, and ends that leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server.fake_engine import DIES, RAISES
from server.served import TESTS, RunningServer, running, start

from firstlight.config import ServerOptions
from firstlight.server.launch import StartError, listen


def eventually(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.02)
    return true()


def engine_pids(server: RunningServer) -> list[int]:
    """The children of the server process."""
    pid = server.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_random_disconnects_free_everything(checkpoint: Path) -> None:
    """200 short requests, 16 at once, many of which leave at a random moment."""
    seed = 20250
    chance = random.Random(seed)

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore) -> str:
        body = {"prompt": "x" * chance.randint(1, 40), "max_tokens": chance.randint(1, 60), "ignore_eos": True}
        body["stream"] = chance.random() < 0.5
        patience = chance.choice([0.001, 0.01, 0.03, 0.1, 60])
        async with gate:
            try:
                async with asyncio.timeout(patience):
                    response = await client.post("/v1/completions", json=body)
            except TimeoutError:
                return "left"
            assert response.status_code == 200, response.text
            return "answered"

    async def all_of_them(url: str) -> list[str]:
        gate = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return await asyncio.gather(*(one(client, gate) for _ in range(200)))

    with running(
        {"model": str(checkpoint), "max_running": 8}, environment={"FAKE_ENGINE_STEP_SECONDS": "0.001"}
    ) as server:
        outcomes = asyncio.run(all_of_them(server.url))
        assert min(outcomes.count("left"), outcomes.count("answered")) > 30, f"seed {seed}"
        assert eventually(lambda: server.live() == 0), f"seed {seed}"
        assert server.metric("firstlight_pages_used") == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_frees_the_request_at_once(checkpoint: Path, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": stream}
    with running({"model": str(checkpoint)}, environment={"FAKE_ENGINE_STEP_SECONDS": "0.02"}) as server:
        if stream:
            with server.http.stream("POST", server.url + "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                assert server.live() == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + "/v1/completions", json=body, timeout=0.3)
        assert eventually(lambda: server.live() == 0, 2.0)
        assert server.metric("firstlight_requests_total", outcome="abort", service_class="online") == 1


def test_a_full_queue_is_a_429(checkpoint: Path) -> None:
    options = {"model": str(checkpoint), "max_running": 1}
    with running(options, {"max_waiting": 2}, {"FAKE_ENGINE_STEP_SECONDS": "0.02"}) as server:
        client = server.client()
        streams = [
            client.completions.create(
                model="echo", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(3)
        ]
        with pytest.raises(openai.RateLimitError, match="3 requests are running or waiting; the limit is 3") as caught:
            client.completions.create(model="echo", prompt="x")
        assert caught.value.response.headers["retry-after"] == "1"
        assert server.metric("firstlight_requests_running", service_class="online") == 1
        assert server.metric("firstlight_requests_waiting", service_class="online") == 2
        assert server.metric("firstlight_requests_total", outcome="queue_full", service_class="online") == 1
        streams[1].close()
        assert eventually(lambda: server.live() == 2)
        streams[2].close()
        streams[0].close()
        assert client.completions.create(model="echo", prompt="ab", temperature=0).choices[0].text == "ab"


@pytest.mark.parametrize(("poison", "said"), [(DIES, "ended with status 9"), (RAISES, "illegal memory access")])
def test_engine_death(checkpoint: Path, poison: int, said: str) -> None:
    with running({"model": str(checkpoint)}, environment={"FAKE_ENGINE_STEP_SECONDS": "0.01"}) as server:
        client = server.client()
        stream = client.completions.create(
            model="echo", prompt="abc", max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        assert next(iter(stream)).choices[0].text == "a"
        with pytest.raises(openai.InternalServerError, match=said) as caught:
            client.completions.create(model="echo", prompt=[poison])
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match=said):
            for _ in stream:
                pass
        health = server.get("/health")
        assert health.status_code == 503
        assert said in health.json()["message"]
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            client.completions.create(model="echo", prompt="a")
        assert server.process.wait(10) != 0
        assert eventually(lambda: said in server.log)


def test_an_engine_that_has_hung_up_and_still_runs_is_ended(checkpoint: Path, tmp_path: Path) -> None:
    """Its message of why it stops is the last; the way down afterwards may be long, and nobody listens any more."""
    environment = {"FAKE_ENGINE_EXIT_SECONDS": "4", "TMPDIR": str(tmp_path)}
    with running({"model": str(checkpoint)}, environment=environment) as server:
        [pid] = engine_pids(server)
        with pytest.raises(openai.InternalServerError, match="illegal memory access"):
            server.client().completions.create(model="echo", prompt=[RAISES])
        assert server.process.wait(20) == 1
        assert not alive(pid)
        assert list(tmp_path.iterdir()) == []
        assert "zmq" not in server.log


@pytest.mark.parametrize(("how", "said"), [("fail", "`layers` is -1"), ("crash", "ended with status 7")])
def test_engine_that_does_not_start(checkpoint: Path, how: str, said: str) -> None:
    server = start({"model": str(checkpoint)}, environment={"FAKE_ENGINE_START": how})
    _, log = server.process.communicate(timeout=20)
    assert server.process.returncode == 1
    assert said in log
    assert "Traceback" not in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_leaves_nothing(checkpoint: Path, tmp_path: Path, number: int) -> None:
    environment = {"FAKE_ENGINE_STEP_SECONDS": "0.01", "TMPDIR": str(tmp_path)}
    with running({"model": str(checkpoint)}, environment=environment) as server:
        [directory] = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        pids = engine_pids(server)
        assert len(pids) == 1
        stream = server.client().completions.create(
            model="echo", prompt="abcdefgh", max_tokens=100, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        server.process.send_signal(number)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
        assert reasons[-1] == "length", "the running request is finished first"
        assert server.process.wait(10) == 0
        assert not alive(pids[0])
        assert list(tmp_path.iterdir()) == []
        assert "Traceback" not in server.log


def test_the_engine_does_not_outlive_a_killed_server(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running({"model": str(checkpoint)}) as server:
        [pid] = engine_pids(server)
        directories = [path for path in tmp_path.glob("firstlight-*") if (path / "engine").exists()]
        assert len(directories) == 1
        server.process.kill()
        server.process.wait(5)
        assert eventually(lambda: not alive(pid), 5.0)
        assert not directories[0].exists()


def test_api_key(checkpoint: Path) -> None:
    with running({"model": str(checkpoint)}, {"api_key": " schlüssel\n", "max_body_mib": 1}) as server:
        assert server.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer schlussel"}, {"Authorization": "schlüssel".encode()}):
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                response = httpx.get(server.url + path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer schlüssel".encode()}
        assert httpx.get(server.url + "/v1/models", headers=right).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()

        big = json.dumps({"prompt": "x" * (1 << 20)}).encode()
        declared = httpx.post(server.url + "/v1/completions", content=big, headers=right)
        chunked = httpx.post(server.url + "/v1/completions", content=iter([big[:1000], big[1000:]]), headers=right)
        for response in (declared, chunked):
            assert response.status_code == 413
            assert "1 MiB" in response.json()["error"]["message"]


def test_only_loopback_without_a_key() -> None:
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(StartError, match=r"--api-key or FIRSTLIGHT_API_KEY"):
            listen(ServerOptions(host=host, port=0))
    listen(ServerOptions(host="127.0.0.1", port=0)).close()
    listen(ServerOptions(host="0.0.0.0", port=0, api_key="k")).close()


def test_a_port_in_use_is_an_error_that_says_so() -> None:
    with listen(ServerOptions(port=0)) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(StartError, match=f"can't listen on 127.0.0.1:{port}: Address already in use; choose"):
            listen(ServerOptions(port=port))


def test_an_engine_that_is_told_to_end_while_it_ends_stays_quiet(tmp_path: Path) -> None:
    """It could not start, and is in its exit handlers when SIGTERM comes: no traceback joins the error."""
    (tmp_path / "slow_to_leave.py").write_text(
        """
import atexit, pathlib, time
def leave():
    pathlib.Path(__file__).with_name("leaving").touch()
    time.sleep(1)
def engine(options):
    atexit.register(leave)
    raise ValueError("no such provider")
"""
    )
    script = """
import pathlib, sys, time
from firstlight.config import EngineOptions
from firstlight.server.spawn import EngineFailedError, EngineProcess
with EngineProcess(EngineOptions(model="m"), "slow_to_leave:engine") as process:
    try:
        process.wait_started()
    except EngineFailedError as error:
        print(error, file=sys.stderr)
    while not pathlib.Path(sys.argv[1], "leaving").exists():
        time.sleep(0.01)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "no such provider\n")


def test_the_engine_knows_which_options_were_given(tmp_path: Path) -> None:
    """A GPU has defaults of its own for those that weren't, so a default must not arrive as if someone had asked for it."""
    (tmp_path / "tells.py").write_text("def engine(options):\n    raise ValueError(sorted(options.model_fields_set))\n")
    script = """
from firstlight.config import EngineOptions
from firstlight.server.spawn import EngineFailedError, EngineProcess
with EngineProcess(EngineOptions.load({"model": "m", "max_running": 256}, {}), "tells:engine") as process:
    try:
        process.wait_started()
    except EngineFailedError as error:
        print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "['max_running', 'model']\n", done.stderr


def test_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with running({"model": str(tmp_path)}, {"served_name": "bare"}) as server:
        client = server.client()
        ids = {"return_token_ids": True}
        reply = client.completions.create(model="bare", prompt=[5, 6, 7], temperature=0, max_tokens=3, extra_body=ids)
        assert reply.choices[0].token_ids == [5, 6, 7]
        assert reply.choices[0].text is None
        chunks = client.completions.create(
            model="bare", prompt=[5, 6, 7], temperature=0, max_tokens=3, stream=True, extra_body=ids
        )
        assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == [5, 6, 7]
        for fields, name in (
            ({"prompt": [5]}, "return_token_ids"),
            ({"prompt": "text", **ids}, "prompt"),
            ({"prompt": [5], "stop": "x", **ids}, "stop"),
        ):
            error = server.post("/v1/completions", json=fields).json()["error"]
            assert error["code"] == "no_tokenizer"
            assert error["param"] == name
        for fields in ({}, ids):
            messages = [{"role": "user", "content": "a"}]
            error = server.post("/v1/chat/completions", json={"messages": messages, **fields}).json()["error"]
            assert (error["code"], error["param"]) == ("no_tokenizer", "messages")
            assert "return_token_ids" not in error["message"]
        assert server.log.count("this checkpoint has no tokenizer: it takes token ids only") == 1


@pytest.mark.parametrize("declared", [{"eos_token_id": 6}, {"eos_token_id": [10**30, 9, 6]}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_answers_end_without_a_tokenizer_too(tmp_path: Path, file: str, declared: dict[str, Any]) -> None:
    """Where the checkpoint says so, unless a request ignores that. Ids beyond the vocabulary never come."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(declared))
    with running({"model": str(tmp_path)}, {"served_name": "bare"}) as server:
        fields = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 3, "return_token_ids": True}
        [choice] = server.post("/v1/completions", json=fields).json()["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == ([5, 6], "stop")
        fields["ignore_eos"] = True
        [choice] = server.post("/v1/completions", json=fields).json()["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == ([5, 6, 7], "length")


def test_a_long_prompt_does_not_stop_the_others(checkpoint: Path) -> None:
    """While megabytes are tokenised, /health goes on answering."""

    async def check(url: str) -> int:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            long = asyncio.create_task(client.post("/v1/completions", json={"prompt": "Wort " * 600_000}))
            answers = 0
            while not long.done():
                assert (await client.get("/health")).status_code == 200
                answers += 1
            assert (await long).json()["error"]["code"] == "context_length_exceeded"
            return answers

    with running({"model": str(checkpoint)}) as server:
        assert asyncio.run(check(server.url)) >= 10


def test_malformed_messages_do_not_kill_the_engine() -> None:
    """The socket is private, but a bug on the other side must not take the model down."""
    script = """
import sys
from firstlight.config import EngineOptions
from firstlight.engine.messages import *
from firstlight.scheduling.sampling import SamplingParams
from firstlight.server.spawn import EngineProcess
with EngineProcess(EngineOptions(model="none"), "server.fake_engine:FakeEngine") as engine:
    engine.wait_started()
    for data in (b"", b"nonsense", b"\\x81\\xa4type\\xa4Nope", encode(Started(1, 2, {})), encode(Abort(["unknown"]))):
        engine.socket.send(data)
    engine.socket.send(encode(Generate("odd", b"abc", SamplingParams())))
    rejected = decode_from_engine(engine.socket.recv())
    assert isinstance(rejected, Rejected) and rejected.status == 400, rejected
    engine.socket.send(encode(Generate("a", pack_tokens([5, 6]), SamplingParams(temperature=0, max_tokens=2))))
    got = []
    while len(got) < 2:
        message = decode_from_engine(engine.socket.recv())
        if isinstance(message, Tokens):
            got += message.deltas[0].tokens
    assert got == [5, 6], got
print("fine")
"""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "fine\n", done.stderr
    assert done.stderr.count("refused what the API process sent") == 4
