"""Tests that need a GPU: nothing is collected where there is none. `bash tests/gpu/run.sh` runs them."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
