"""The product kernels compile for NVIDIA and AMD, fit their shared memory, and multiply FP8 as FP8."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize(
    ("backend", "architecture", "shared_kib"), [("cuda", "90", 227), ("hip", "gfx942", 64), ("hip", "gfx950", 160)]
)
def test_compiles(backend: str, architecture: str, shared_kib: int) -> None:
    """In a process of its own: the interpreter's switch is read when a kernel is defined."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_products.py")
    done = subprocess.run(
        [sys.executable, str(script), backend, architecture],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 21
    for kernel in kernels:
        assert kernel["shared"] <= shared_kib * 1024, kernel
        dots = kernel["kernel"].startswith(("grouped", "block"))
        assert kernel["fp8"] == dots, f"{kernel['kernel']}: FP8 {'is widened before' if dots else 'in'} the product"
