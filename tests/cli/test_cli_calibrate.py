"""`firstlight calibrate` as people run it, and `firstlight ops` with what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[1] / "tiny_configs"
SMALL = ("--weights", "random", "--device", "cpu", "--max-running", "2", "--step-tokens", "32", "--max-context", "64")


def firstlight(*arguments):
    command = [sys.executable, "-m", "firstlight", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_table_is_written_and_chosen_by(tmp_path):
    table = tmp_path / "table.json"
    made = firstlight("calibrate", TINY / "llama.json", *SMALL, "--only", "linear", "--out", table)
    assert made.returncode == 0, made.stderr
    assert f"written to {table}" in made.stdout
    assert "with random weights of seed 0" in made.stdout
    assert {group["op"] for group in json.loads(table.read_text())["groups"]} == {"linear"}
    shown = firstlight("ops", TINY / "llama.json", *SMALL, "--table", table)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if "lm_head.product" in line)
    assert lines[head + 1].startswith("      measured ")


def test_mistakes_are_explained(tmp_path):
    wrong = firstlight("calibrate", TINY / "llama.json", *SMALL, "--only", "linaer", "--out", tmp_path / "t.json")
    assert wrong.returncode == 1
    assert "--only linaer: no such op; there are " in wrong.stderr
    unasked = firstlight("calibrate", TINY / "llama.json", "--device", "cpu", "--out", tmp_path / "t.json")
    assert unasked.returncode == 1
    assert "no weights here; for random ones say --weights random" in unasked.stderr
    for out, reason in [(tmp_path / "no" / "t.json", "there is no folder"), (tmp_path, "this is a directory")]:
        nowhere = firstlight("calibrate", TINY / "llama.json", *SMALL, "--out", out)
        assert nowhere.returncode == 1
        assert nowhere.stderr.startswith(f"firstlight: error: --out {out}: {reason}")
        assert not nowhere.stdout  # nothing was measured


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_table_that_cannot_be_written_in_the_end_is_an_error_after_the_report():
    full = firstlight("calibrate", TINY / "llama.json", *SMALL, "--only", "linear", "--out", "/dev/full")
    assert full.returncode == 1
    assert "calls timed" in full.stdout
    assert "written to" not in full.stdout
    assert "--out /dev/full: it can't be written: No space left on device" in full.stderr
    assert "Traceback" not in full.stderr
