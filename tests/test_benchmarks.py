"""The scripts in benchmarks/ find what they import."""

from __future__ import annotations

import math
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch

from benchmarks import kernels_all
from firstlight.hardware import Hardware

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
OPTIONAL = {"kernels", "fla", "triton", "vllm", "sglang"}
"""Packages that may not be installed here and that something imports if they seem to be."""


def test_no_script_has_the_name_of_a_package() -> None:
    """A script's folder comes first in its path, so a neighbour named like a package stands in for it, in every import."""
    names = {path.stem for path in BENCHMARKS.glob("*.py")} | {
        path.name for path in BENCHMARKS.iterdir() if path.is_dir()
    }
    assert not names & (set(packages_distributions()) | OPTIONAL)


def test_a_kernel_that_fails_or_is_wrong_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_all, "DEVICE", torch.device("cpu"))
    x = torch.randn(4, 64)
    right = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]

    def broken() -> None:
        raise ValueError("no such tile")

    others = {
        "broken": ([broken], None),
        "wrong": ([lambda: right * 2], lambda: right),
        "nan": ([lambda: right * math.nan], lambda: right),
        "right": ([lambda: right], lambda: right),
    }
    case = kernels_all.Case("silu_mul", "T=4", [((x,), {})], lambda: right, 1536.0, others=others)
    here = Hardware("a CPU", "cpu", "avx2", peak={"bfloat16": 1e12})
    rows = {row["who"]: row for row in kernels_all.measure(case, here, 1e9, "", kernels=False)}
    assert rows["broken"]["failed"] == "ValueError: no such tile"
    for name in ("wrong", "nan"):
        assert rows[name]["wrong"]
        assert "us" not in rows[name]
    assert rows["right"]["us"] > 0
    assert "FAILED: ValueError" in kernels_all.line(rows["broken"])
    assert "not timed" in kernels_all.line(rows["wrong"])


def test_cases_before_one_that_cannot_be_made_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def group():  # type: ignore[no-untyped-def]
        yield kernels_all.Case("silu_mul", "T=1", [], None, 1.0)
        yield kernels_all.Case("silu_mul", "T=2", [], None, 1.0)
        raise torch.OutOfMemoryError("no room")

    assert [case.name for case in kernels_all.cases_of(group, "T=2")] == ["T=2"]
    assert "group: FAILED to make the cases after T=2: OutOfMemoryError: no room" in capsys.readouterr().out
