"""Tests that need a GPU: nothing is collected where there is none. `bash tests/gpu/run.sh` runs them."""

from __future__ import annotations

import os

worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if (
    gpus := os.environ.get("TEST_GPUS") if worker else None
):  # of run.sh: a worker has one of them, chosen before torch looks
    devices = gpus.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker.removeprefix("gw")) % len(devices)]

import torch  # noqa: E402

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # References run on the CPU in float64: workers that each take all cores wait for each other most of the time.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))
