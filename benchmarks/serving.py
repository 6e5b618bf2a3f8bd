"""Servers for benchmarks: started as users start them, waited for, and ended."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = 30
READY_LINE = re.compile(r"ready on (http://\S+) \(model (.+)\)")


class ServerError(Exception):
    """The server did not start; the message has its last lines."""


@dataclass(frozen=True)
class Server:
    """A server that is ready. model: its name there. pid: of its process. log: the file that it writes to. start_seconds:
    until it was ready."""

    url: str
    model: str
    pid: int
    log: Path
    start_seconds: float

    def metrics(self) -> dict[str, float]:
        """What /metrics says now, as {name with labels: value}."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines}


@contextlib.contextmanager
def firstlight_server(options: Sequence[str], ready_seconds: float = 300) -> Iterator[Server]:
    """`firstlight serve` with these arguments, on a free port. Raises ServerError if it doesn't get ready."""
    command = [sys.executable, "-m", "firstlight", "serve", *options, "--port", "0"]
    with started(command, ready_seconds) as server:
        yield server


@contextlib.contextmanager
def started(command: Sequence[str], ready_seconds: float, url: str | None = None) -> Iterator[Server]:
    """A server that this command runs. It is ready when it prints our ready line, or, for a given `url`, when that lists
    models. Raises ServerError if that takes longer than `ready_seconds`, or the server ends."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        begin = time.monotonic()
        try:
            while (found := _answering(log, url)) is None:
                if process.poll() is not None or time.monotonic() - begin > ready_seconds:
                    how = "ended" if process.poll() is not None else f"was not ready after {ready_seconds:g} s"
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
                    raise ServerError(f"{command[0]}: the server {how}:\n{tail}")
                time.sleep(0.1)
            yield Server(*found, process.pid, log, time.monotonic() - begin)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answering(log: Path, url: str | None) -> tuple[str, str] | None:
    """Where the server answers, and for which model; None while it doesn't."""
    if url is None:
        match = READY_LINE.search(log.read_text(errors="replace"))
        return (match[1], match[2]) if match else None
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return url, str(json.load(response)["data"][0]["id"])
    except (urllib.error.URLError, OSError):
        return None


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
