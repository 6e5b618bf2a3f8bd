"""What `benchmarks/gpu_checks.py` lets pass, and what it doesn't."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_checks


class Known:
    """A judge that knows one gap."""

    def __init__(self, gap: float) -> None:
        self.known, self.asked = gap, []

    def gap(self, before, one, other):
        self.asked.append((list(before), one, other))
        return self.known


@pytest.mark.parametrize(("gap", "verdict"), [(0.4, "tie"), (0.6, "FAULT")])
def test_answers_may_part_where_two_tokens_are_as_good(gap, verdict):
    judge = Known(gap)
    [same, other] = gpu_checks.compare([[1, 2], [3]], [[7, 8], [4, 5, 6]], [[7, 8], [4, 9, 9]], "bfloat16", judge)
    assert (same["verdict"], other["verdict"], other["place"], other["gap"]) == ("equal", verdict, 1, gap)
    assert judge.asked == [([3, 4], 5, 9)]
    assert f"{gap:.4f} apart" in gpu_checks.answer_line({**other, "prompt_tokens": 1})


def test_an_answer_that_ends_too_soon_is_a_fault():
    [row] = gpu_checks.compare([[1]], [[4, 5, 6]], [[4, 5]], "float32", Known(0.0))
    assert row["verdict"] == "FAULT"


def test_what_comes_after_the_end_of_an_answer_is_not_compared():
    assert gpu_checks.whole_answer([4, 2, 7, 2], 2) == [4, 2]
    assert gpu_checks.whole_answer([4, 7], 2) == [4, 7]
    assert gpu_checks.whole_answer([4, 7], None) == [4, 7]


def test_every_family_that_runs_is_verified():
    names = {job.config.stem for job in gpu_checks.jobs(4)}
    assert {"llama", "qwen3_5_moe", "deepseek_v3", "Qwen3.5-35B-A3B-FP8"} <= names
    assert not {"kimi_linear", "gpt_oss", "deepseek_v32"} & names


def test_a_model_that_agrees_and_one_that_cannot_be_tried(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"model_type": "no_such_model"}))
    todo = [gpu_checks.Job(gpu_checks.TINY / "llama.json", "float32", 1), gpu_checks.Job(broken, "float32")]
    rows = {row["model"]: row for row in gpu_checks.verify_all(todo, "cpu", [], 1, 120)}
    assert rows["llama"]["verdict"] == "agree"
    assert rows["llama"]["worst"] < 1e-4
    assert rows["broken"]["verdict"] == "not tried"
    assert "no_such_model" in gpu_checks.verify_line(rows["broken"])
