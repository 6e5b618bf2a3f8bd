"""Tests that need a GPU: nothing is collected where there is none. `bash tests/gpu/run.sh` runs them."""

from __future__ import annotations

import os

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # References run on the CPU in float64: workers that each take all cores wait for each other most of the time.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))
