"""Runs a script of this folder without the interpreter, whose switch is read when a kernel is defined: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstlight.hardware.detect import gluon_is_known

needs_gluon = pytest.mark.skipif(
    not gluon_is_known(),
    reason="of one release of triton: with others such kernels refuse, and launches are Triton's own",
)

HERE = Path(__file__).parent


def printed(script: str, *arguments: str, timeout: float = 400) -> list[dict[str, Any]]:
    """The JSON objects that it prints, one a line. Fails with the end of its errors, or after `timeout` seconds."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
