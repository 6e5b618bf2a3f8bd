"""A real `firstlight serve` on a tiny checkpoint, for tests that go through HTTP to the real engine."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 300
"""Most of it is compiling, for the first server on a GPU."""


@contextmanager
def served(checkpoint: Path | str, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """(URL, process, log file) of a server that is ready; it is stopped afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        command = [sys.executable, "-m", "firstlight", "serve", str(checkpoint), "--port", "0", *options]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not (ready := re.search(r"ready on (http://\S+)", log.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.05)
            yield ready[1], process, log
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def metrics(text: str) -> dict[str, float]:
    """Prometheus text as {name with labels: value}."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def rank_processes(ancestor: int) -> list[int]:
    """The processes of followers that descend from a process: their ids."""
    parents, ranks = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if b"firstlight.engine.ranks" in (entry / "cmdline").read_bytes():
                    ranks.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue

    def descends(pid: int) -> bool:
        return pid == ancestor or (pid in parents and descends(parents[pid]))

    return [pid for pid in ranks if descends(pid)]
