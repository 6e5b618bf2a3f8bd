"""`firstlight ops` as people run it, and how its lines are put together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from firstlight.engine.ops_report import _merged, ranges

TINY = Path(__file__).parents[1] / "tiny_configs"


def firstlight(*arguments):
    command = [sys.executable, "-m", "firstlight", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "80"})


def test_choices_and_refusals_are_readable_in_a_pipe():
    shown = firstlight("ops", TINY / "qwen3.json", "--gpu", "h200")
    assert shown.returncode == 0, shown.stderr
    assert "…" not in shown.stdout
    lines = shown.stdout.splitlines()
    norm = next(i for i, line in enumerate(lines) if line.startswith("rms_norm "))
    buckets = sum(line.startswith("  ") and (": decode, " in line or ": prefill, " in line) for line in lines)
    assert lines[norm].split() == ["rms_norm", "triton_fused", f"0-{buckets - 1}", "layers.*.input_layernorm.norm"]
    assert lines[norm + 1] == "      by rank"
    assert lines[norm + 2].startswith("      not ")
    assert "  0: decode, 1 row" in lines


def test_ranks_are_bound_as_they_would_run():
    shown = firstlight("ops", TINY / "qwen3_next.json", "--tensor-parallel", 2)
    assert shown.returncode == 0, shown.stderr
    assert any(line.split()[0] == "all_reduce" for line in shown.stdout.splitlines() if line.strip())
    refused = firstlight("ops", TINY / "qwen3_next.json", "--tensor-parallel", 3)
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert "2 units of 1 can't be split evenly over 3 tp ranks; legal sizes: [1, 2]" in line


def test_ranks_that_cannot_split_a_model_end_in_readable_lines():
    shown = firstlight(
        "profile", TINY / "qwen3_next.json", "--weights", "random", "--device", "cpu", "--tensor-parallel", 3
    )
    assert shown.returncode == 1
    assert "Traceback" not in shown.stderr
    assert "can't be split evenly over 3 tp ranks" in shown.stderr.splitlines()[-1]


def test_a_model_that_cannot_run_yet_is_refused_by_its_type():
    shown = firstlight("ops", TINY.parent / "configs" / "gpt-oss-120b.json", "--gpu", "h200")
    assert shown.returncode == 1
    [line] = shown.stderr.splitlines()
    assert (
        "models of type 'gpt_oss' can be predicted (firstlight explain), not run yet; these run: deepseek_v3, " in line
    )


def test_ranges_join_neighbours():
    assert ranges({3, 0, 1, 2, 5, 7, 8}) == "0-3, 5, 7-8"
    assert ranges([4]) == "4"


def test_reasons_that_differ_in_numbers_are_one():
    assert _merged(["up to 4 tokens, not 8", "up to 4 tokens, not 256"]) == "up to 4 tokens, not 8 to 256"
    assert _merged(["for GPUs"]) == "for GPUs"
    assert _merged(["9.5 us", "120 us", "30 us"]) == "9.5 to 120 us"


def test_the_version_is_shown():
    shown = firstlight("--version")
    assert shown.returncode == 0
    assert shown.stdout.startswith("firstlight ")
