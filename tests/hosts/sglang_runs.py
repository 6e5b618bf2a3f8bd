"""Start real SGLang on a job (`sglang_worker.py`) or as a server, and see what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "sglang_worker.py"
ENVIRONMENT = {
    # A second thread only gets in the way of tiny products, and of other tests.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # SGLang keeps windows of convolutions in bfloat16 unless it is told otherwise.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
EXTRA_BUFFER = {"SGLANG_TEST_EXTRA_BUFFER": "1"}
"""Hybrids with the radix cache of a GPU (see `sglang_cpu_platform`)."""
EXTERNAL = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "firstlight.plugin.sglang.models", "SGLANG_PLUGINS": "none"}
"""The model package alone: no entry point of ours is run."""
SECONDS = 500


@dataclass(frozen=True)
class Outcome:
    """rounds: prompts, answers, cached and retracted by request. log: SGLang's, with the lines of its processes."""

    rounds: list[dict[str, Any]]
    log: str

    def said(self, text: str) -> list[str]:
        """Lines of the log with `text`, but for the one that lists all options."""
        return [line for line in self.log.splitlines() if text in line and "server_args=" not in line]


def run(
    folder: Path, model: Path, rounds: list[dict[str, Any]], environment: dict[str, str] | None = None, **options: Any
) -> Outcome:
    """Run a job; what goes wrong is an AssertionError with SGLang's log."""
    job, result = folder / "job.json", folder / "result.json"
    job.write_text(json.dumps({"engine": {"model_path": str(model), **options}, "rounds": rounds}))
    finished = start([str(WORKER), str(job), str(result)], environment)
    assert finished.returncode == 0, finished.stdout
    return Outcome(log=finished.stdout, **json.loads(result.read_text()))


def start(arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in this environment with SGLang's settings, and wait for its end; stdout has stderr in it."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
