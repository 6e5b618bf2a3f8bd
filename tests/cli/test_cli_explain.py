"""`firstlight explain` as people run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from firstlight.predict.report import amount, counted, duration

CONFIGS = Path(__file__).parents[1] / "configs"


def explain(*arguments, columns=160):
    command = [sys.executable, "-m", "firstlight", "explain", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"COLUMNS": str(columns), "PATH": ""}
    )


def test_a_step_is_explained():
    shown = explain(CONFIGS / "Qwen3.5-35B-A3B.json", "--gpu", "h200", "--batch", 64, "--context", 4096)
    assert shown.returncode == 0, shown.stderr
    for wanted in (
        "80% interval",
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


def test_nothing_is_cut_off_in_a_pipe():
    shown = explain(CONFIGS / "Qwen3.5-35B-A3B.json", "--batch", 1, columns=80)
    assert shown.returncode == 0, shown.stderr
    assert "…" not in shown.stdout
    assert "1 request at 4,096 tokens" in shown.stdout
    assert any(line.split()[:2] == ["linear", "in_proj_qkvz"] for line in shown.stdout.splitlines())


def test_figures_have_three_digits():
    assert [duration(seconds) for seconds in (2.5, 0.0123, 0.9999e-3, 68e-9, 0)] == [
        "2.50 s",
        "12.3 ms",
        "1.00 ms",
        "68 ns",
        "<1 ns",
    ]
    assert [amount(value, "B") for value in (408, 999.9e6, 20e6, 1)] == ["408 B", "1.00 GB", "20.0 MB", "1 B"]
    assert [counted(number, "page") for number in (1, 2911)] == ["1 page", "2,911 pages"]
