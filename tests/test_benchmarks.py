"""The scripts in benchmarks/ find what they import."""

from __future__ import annotations

from importlib.metadata import packages_distributions
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
OPTIONAL = {"kernels", "fla", "triton", "vllm", "sglang"}
"""Packages that may not be installed here and that something imports if they seem to be."""


def test_no_script_has_the_name_of_a_package() -> None:
    """A script's folder comes first in its path, so a neighbour named like a package stands in for it, in every import."""
    names = {path.stem for path in BENCHMARKS.glob("*.py")} | {
        path.name for path in BENCHMARKS.iterdir() if path.is_dir()
    }
    assert not names & (set(packages_distributions()) | OPTIONAL)
