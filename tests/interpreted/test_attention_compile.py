"""The kernels of attention compile for NVIDIA and AMD, fit their shared memory, and multiply on the matrix units."""

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
    script = Path(__file__).with_name("compile_attention.py")
    done = subprocess.run(
        [sys.executable, str(script), backend, architecture],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = {line["kernel"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert len(kernels) == {"90": 15, "gfx942": 7, "gfx950": 11}[architecture]
    for name, kernel in kernels.items():
        assert kernel["shared"] <= shared_kib * 1024, kernel
        if name.startswith("prefill") and "float32" not in name:
            assert kernel["products"] == ["bf16"], kernel
        if name.startswith("hopper"):
            assert kernel["products"] == ["f16" if name.endswith("128") else "bf16"], kernel
            assert kernel["transfers"] == ["4d"], kernel
            assert kernel["spilled"] == 0, kernel
