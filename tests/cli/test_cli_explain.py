"""`firstlight explain` as people run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"


def explain(*arguments):
    command = [sys.executable, "-m", "firstlight", "explain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={"COLUMNS": "160", "PATH": ""})


def test_a_step_is_explained():
    shown = explain(CONFIGS / "Qwen3.5-35B-A3B.json", "--gpu", "h200", "--batch", 64, "--context", 4096)
    assert shown.returncode == 0, shown.stderr
    for wanted in (
        "80 % interval",
        "no implementation takes less",
        "per million tokens",
        "experts",
        "gated_delta",
        "What if",
        "FP8 KV",
    ):
        assert wanted in shown.stdout


def test_mixed_steps_drafts_and_layouts_are_priced():
    shown = explain(
        CONFIGS / "Qwen3-8B.json",
        "--gpu",
        "b200",
        "--tp",
        2,
        "--batch",
        8,
        "--prefill",
        512,
        "--drafts",
        2,
        "--fp8-weights",
    )
    assert shown.returncode == 0, shown.stderr
    assert "attention prefill" in shown.stdout
    assert "2 drafts a step" in shown.stdout


def test_mistakes_end_in_one_line():
    for arguments, reason in [
        (["--gpu", "h300"], "described are b200"),
        (["--batch", 0], "an empty step"),
        (["--tp", 3], "can't be split evenly over 3 tp ranks"),
    ]:
        shown = explain(CONFIGS / "Qwen3-8B.json", *arguments)
        assert shown.returncode == 1
        assert reason in shown.stderr
        assert len(shown.stderr.strip().splitlines()) == 1
