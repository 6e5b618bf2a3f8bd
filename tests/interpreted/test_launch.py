"""`kernel` launches what Triton would: the same variant with the same arguments, the first time and later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
SAME = {"another address", "address off by 16", "n = 17", "factor = 1", "two sizes", "three sizes"}
"""Cases that the variant of the first serves."""
KNOWN = {"n = 0", "least n in 32 bits", "negative n in 64 bits"}
"""Cases that the variant of one between serves."""


def test_every_launch_is_the_one_that_triton_makes() -> None:
    """In a process of its own: the interpreter's switch is read when a kernel is defined."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("launch_variants.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, hooked = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 31
    plain = lines[0]["triton"][0]
    for line in lines:
        case = line["case"]
        assert line["first"] == line["triton"], f"{case}: the first launch isn't Triton's"
        assert line["quick"] == line["triton"], f"{case}: the quick launch isn't Triton's"
        assert (line["triton"][0] == plain) == (case in SAME | {"plain", "device"}), case
        assert line["new"] == (case not in SAME | KNOWN), f"{case}: {line['new']} of two launches went through Triton"
    assert hooked["launches"] == ["hook", "launch"], "a launch hook is called for variants that are known"
