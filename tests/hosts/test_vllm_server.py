"""vLLM's OpenAI server as a user starts it, with nothing set: processes of its own, compilation asked for, the openai client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from hosts.answers import check_greedy, native, prompts
from hosts.vllm_runs import ENVIRONMENT, need
from reference import reference_model, save_checkpoint

pytestmark = pytest.mark.timeout(900)
READY_SECONDS = 400
FAMILY = "qwen3_5_text"
EXTRA = {"ignore_eos": True, "return_token_ids": True}
SPECIAL = (0, 511)
"""Tokens that have no text."""


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    url: str
    checkpoint: Path
    log: Path


def add_tokenizer(checkpoint: Path) -> None:
    """Words that are numbers: token n is "n", but for the first and the last, which are special."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel({"null": 0, **{str(n): n for n in range(1, 511)}, "end": 511}, unk_token="null")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="null", eos_token="end")
    fast.chat_template = "{% for message in messages %}1 {{ message.content }} {% endfor %}2"
    fast.save_pretrained(checkpoint)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    need(FAMILY)
    folder = tmp_path_factory.mktemp("server")
    checkpoint, log = save_checkpoint(FAMILY, folder / "checkpoint"), folder / "log"
    add_tokenizer(checkpoint)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What `vllm serve` runs.
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--served-model-name", "tiny"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **ENVIRONMENT})
    try:
        deadline = time.monotonic() + READY_SECONDS
        url = f"http://127.0.0.1:{port}"
        while not _is_ready(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield Server(url, checkpoint, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_completions_are_the_native_engines(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    given = prompts((5, 40, 130))
    # One request: a batch for the engine.
    answer = client.completions.create(model="tiny", prompt=given, max_tokens=32, temperature=0, extra_body=EXTRA)
    got = [choice.token_ids for choice in sorted(answer.choices, key=lambda c: c.index)]  # type: ignore[attr-defined]
    assert got == native(server.checkpoint, given, 32)


def test_a_chat_is_streamed(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    words = " ".join(map(str, range(20, 60)))
    chunks = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": words}],
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body=EXTRA,
    )
    prompt: list[int] = []
    got, text = [], ""
    for chunk in chunks:
        prompt = prompt or getattr(chunk, "prompt_token_ids", None) or []
        for choice in chunk.choices:
            got += getattr(choice, "token_ids", None) or []
            text += choice.delta.content or ""
    assert prompt == [1, *range(20, 60), 2]
    assert len(got) == 24
    assert text.split() == [str(token) for token in got if token not in SPECIAL]
    check_greedy(reference_model(FAMILY), prompt, got)


def test_log_and_metric_say_that_we_serve(server: Server) -> None:
    log = server.log.read_text()
    assert "serves Qwen3_5ForCausalLM" in log
    assert "Firstlight: model_type qwen3_5_text, 4 layers" in log
    metrics = httpx.get(f"{server.url}/metrics").text
    line = next(line for line in metrics.splitlines() if line.startswith("firstlight_plugin_active{"))
    assert 'architecture="Qwen3_5ForCausalLM"' in line
    assert 'host="vllm"' in line
    assert line.endswith(" 1.0")
