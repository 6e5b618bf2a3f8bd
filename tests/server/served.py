"""A server in a process of its own, with the fake engine, as tests see it: a URL and a log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from server.fake_engine import END, VOCAB_SIZE

TESTS = Path(__file__).parents[1]
CHAT_TEMPLATE = (
    "{% if messages[0].content == 'refuse me' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt and not unmarked %}<|assistant|>{% endif %}"
)
SERVE = """
import json, sys
from firstlight.config import EngineOptions, ServerOptions
from firstlight.errors import FirstlightError
from firstlight.server.launch import serve
try:
    serve(EngineOptions(**json.loads(sys.argv[1])), ServerOptions(**json.loads(sys.argv[2])), "server.fake_engine:FakeEngine")
except FirstlightError as error:
    sys.exit(str(error))
"""


def write_checkpoint(directory: Path) -> Path:
    """A checkpoint with a byte-level tokenizer, whose ids are bytes, and a chat template; the fake engine needs no
    more."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True)
    alphabet = _byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    assert tokenizer.token_to_id("<|end|>") == END
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": VOCAB_SIZE, "eos_token_id": END})
    )
    return directory


def _byte_characters() -> list[str]:
    """The visible characters that byte-level tokenizers write for bytes 0 to 255."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


@dataclass
class RunningServer:
    """A server process that is ready."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=20))

    @property
    def log(self) -> str:
        """What it has written to stderr."""
        return "".join(self.lines)

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """The real client; it doesn't retry, so that errors are seen."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.http.post(self.url + path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(self.url + path, **options)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample on /metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        raise KeyError(name)

    def live(self) -> float:
        """Requests that the engine still has."""
        return sum(
            self.metric(name, service_class=service)
            for name in ("firstlight_requests_running", "firstlight_requests_waiting")
            for service in ("online", "offline")
        )


def start(
    engine_options: dict[str, Any],
    server_options: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> RunningServer:
    """Start a server on a free port; returns before it is ready."""
    options = {"port": 0, "drain_seconds": 5, **(server_options or {})}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(engine_options), json.dumps(options)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
            **(environment or {}),
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    return RunningServer(process)


@contextmanager
def running(*arguments: Any, **named: Any) -> Iterator[RunningServer]:
    """`start`, wait for the ready line, and stop it at the end."""
    server = start(*arguments, **named)
    assert server.process.stderr is not None
    ready = threading.Event()

    def follow(stream: Any) -> None:
        for line in stream:
            server.lines.append(line)
            if found := re.search(r"ready on (http://\S+)", line):
                server.url = found[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=follow, args=(server.process.stderr,), daemon=True)
    reader.start()
    try:
        assert ready.wait(30), f"not ready: {server.log}"
        assert server.url, f"did not start: {server.log}"
        yield server
    finally:
        server.http.close()
        server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(15)
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise
        finally:
            reader.join(5)
            server.process.stderr.close()
