"""Serves a model, asks it two questions with the real `openai` client, and stops the server.

    python examples/demo.py PATH      a .gguf file, or a directory with config.json and safetensors

Fails (exit status 1) unless the capital of France is Paris.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import openai

START_SECONDS = 120
STREAMED_QUESTION = "Explain in three sentences why the sky is blue."
CHECKED_QUESTION = "What is the capital of France?"


class DemoError(Exception):
    """The demo can't go on; the message says why."""


@dataclass
class Server:
    """A `firstlight serve` that is ready."""

    process: subprocess.Popen[str]
    url: str
    model: str
    start_seconds: float


def start(path: str) -> Server:
    """Start a server on a free port, show what it says, and wait until it is ready."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "firstlight", "serve", path, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    found: list[re.Match[str]] = []
    ready = threading.Event()

    def follow() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            print("   ", line, end="", file=sys.stderr)
            if not found and (match := re.search(r"ready on (http://\S+) \(model (.+)\)", line)):
                found.append(match)
                ready.set()
        ready.set()  # the server has ended

    threading.Thread(target=follow, daemon=True).start()
    in_time = ready.wait(START_SECONDS)
    if not found:
        stop(process)
        raise DemoError("the server did not start; see above" if in_time else f"not ready after {START_SECONDS} s")
    return Server(process, found[0][1], found[0][2], time.monotonic() - begin)


def stop(process: subprocess.Popen[str]) -> None:
    """End the server; it finishes what it is doing."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ask_streamed(client: openai.OpenAI, model: str) -> None:
    """Ask, and print the answer as it comes, then how fast it came."""
    print(f"\n> {STREAMED_QUESTION}")
    begin = time.monotonic()
    first = 0.0
    tokens = 0
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": STREAMED_QUESTION}],
        temperature=0,
        max_tokens=128,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.choices and (text := chunk.choices[0].delta.content):
            first = first or time.monotonic()
            print(text, end="", flush=True)
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    if tokens < 2:
        raise DemoError(f"the streamed answer has {tokens} tokens")
    rate = (tokens - 1) / (time.monotonic() - first)
    print(f"\n  [{tokens} tokens; first token after {first - begin:.2f} s, then {rate:.1f} tokens/s]")


def ask_checked(client: openai.OpenAI, model: str) -> None:
    """Ask the question whose answer is known."""
    print(f"\n> {CHECKED_QUESTION}")
    begin = time.monotonic()
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": CHECKED_QUESTION}], temperature=0, max_tokens=64
    )
    answer = reply.choices[0].message.content or ""
    tokens = reply.usage.completion_tokens if reply.usage else 0
    print(f"{answer}\n  [{tokens} tokens in {time.monotonic() - begin:.2f} s]")
    if "Paris" not in answer:
        raise DemoError(f"the answer should name Paris; it is {answer!r}")


def main() -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", help="a .gguf file, or a directory with config.json and safetensors")
    path = parser.parse_args().path
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server is stopped then, too
    print(f"$ firstlight serve {path} --port 0")
    server = None
    try:
        server = start(path)
        print(f"    ready after {server.start_seconds:.1f} s")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
        ask_streamed(client, server.model)
        ask_checked(client, server.model)
    except (DemoError, openai.OpenAIError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        if server is not None:
            stop(server.process)
    program = Path(sys.executable).with_name("firstlight")
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "temperature": 0}
    print(
        f"""
It works. To go on:
  {shlex.join([str(program), "chat", path])}
  {shlex.join([str(program), "serve", path])}    # and in another terminal:
  curl http://127.0.0.1:8000/v1/chat/completions -d '{json.dumps(body)}'
  docs/server.md says what the API can do."""
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
