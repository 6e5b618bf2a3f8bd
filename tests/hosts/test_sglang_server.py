"""SGLang's OpenAI server with our class behind it, asked by the openai client."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from hosts.answers import native, prompts
from hosts.sglang_runs import ENVIRONMENT
from reference import save_checkpoint, tiny_config
from server.served import write_checkpoint
from tokenizers import Tokenizer

pytestmark = pytest.mark.timeout(900)

READY_SECONDS = 400
VOCABULARY = 260
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published as a model with images, with a tokenizer whose ids are bytes."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(folder)
    text = {**tiny_config("qwen3_5_moe")["text_config"], "vocab_size": VOCABULARY, "eos_token_id": 256}
    return save_checkpoint("qwen3_5_moe", folder, text_config=text)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[str]:
    """URL of a server of SGLang's, started by its own command."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "model-path": checkpoint, "port": port, "device": "cpu", "dtype": "float32", "attention-backend": "torch_native",
        "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.2, "max-total-tokens": 4096,
    }  # fmt: skip
    command = [sys.executable, "-m", "sglang.launch_server", "--disable-overlap-schedule", "--enable-metrics"]
    command += [
        "--enable-cache-report",
        *(part for name, value in options.items() for part in (f"--{name}", str(value))),
    ]
    log = checkpoint / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **ENVIRONMENT})
    try:
        deadline = time.monotonic() + READY_SECONDS
        while "ready to roll" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    """The official client."""
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def test_completions_are_the_native_engines(client: openai.OpenAI, checkpoint: Path) -> None:
    given = [[token % 256 for token in prompt] for prompt in prompts((1, 20, 70))]
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for prompt, tokens in zip(given, native(checkpoint, given, 24), strict=True):
        answer = client.completions.create(
            model="default", prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].text == tokenizer.decode(tokens)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)


def test_a_chat_streams_and_its_second_turn_finds_the_first_cached(client: openai.OpenAI) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": "What is a delta rule, in one sentence?"}]
    chunks = client.chat.completions.create(
        model="default", messages=messages, max_tokens=16, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    again = client.chat.completions.create(
        model="default", messages=messages, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
    )  # type: ignore[arg-type]
    assert again.choices[0].message.content == text
    prompt = list(range(60, 140))
    first = client.completions.create(model="default", prompt=prompt, max_tokens=8, temperature=0, logprobs=2)
    assert first.choices[0].logprobs is not None
    longer = client.completions.create(model="default", prompt=[*prompt, 65], max_tokens=8, temperature=0)
    assert longer.usage.prompt_tokens_details.cached_tokens > 0  # type: ignore[union-attr]


def test_images_are_refused_as_of_any_text_model(client: openai.OpenAI) -> None:
    url = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
            max_tokens=4,
        )


def test_the_log_and_the_metrics_say_who_serves(server: str, checkpoint: Path) -> None:
    assert "serves Qwen3_5MoeForConditionalGeneration: model_type qwen3_5_moe" in (checkpoint / "log").read_text()
    metrics = httpx.get(f"{server}/metrics").text
    assert 'firstlight_plugin_active{architecture="Qwen3_5MoeForConditionalGeneration",host="sglang"' in metrics
