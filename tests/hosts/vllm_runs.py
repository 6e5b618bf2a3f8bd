"""Start real vLLM on a job (`vllm_worker.py`) or as a server, and see what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from firstlight.plugin.vllm import vllm_version

WORKER = Path(__file__).parent / "vllm_worker.py"
ENVIRONMENT = {
    # A second thread only gets in the way of tiny products, and of other tests.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SECONDS = 400


@dataclass(frozen=True)
class Outcome:
    """rounds: as asked. answers, logprobs: [round][prompt][token]. metrics: counters after each round. model_class: who served."""

    rounds: list[dict[str, Any]]
    answers: list[list[list[int]]]
    logprobs: list[list[list[float]]]
    metrics: list[dict[str, float]]
    model_class: str
    log: str

    def count(self, name: str, round_number: int) -> float:
        """How much a counter of vLLM's grew in a round."""
        before = self.metrics[round_number - 1][name] if round_number else 0
        return self.metrics[round_number][name] - before


def need(family: str) -> None:
    """Skip a test of a family that this vLLM has no class for."""
    if vllm_version().startswith("0.26.") and family.startswith("qwen3_5") and "_text" in family:
        pytest.skip("vLLM 0.26 knows Qwen3.5 with a vision tower alone")


def run(
    folder: Path, model: Path, rounds: list[dict[str, Any]], environment: dict[str, str] | None = None, **options: Any
) -> Outcome:
    """Run a job; what goes wrong is an AssertionError with vLLM's log."""
    job, result = folder / "job.json", folder / "result.json"
    job.write_text(json.dumps({"model": str(model), "options": options, "rounds": rounds}))
    finished = start([str(WORKER), str(job), str(result)], environment)
    assert finished.returncode == 0, finished.stdout
    return Outcome(rounds=rounds, log=finished.stdout, **json.loads(result.read_text()))


def start(arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in this environment with vLLM's settings, and wait for its end; stdout has stderr in it."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
