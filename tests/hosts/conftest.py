"""Each host lives in an environment of its own (`make test-hosts`): only the tests of the one that is here are collected."""

from __future__ import annotations

from importlib.util import find_spec

import torch

collect_ignore_glob = [f"test_{host}_*.py" for host in ("vllm", "sglang") if find_spec(host) is None]

# What hosts are compared with is tiny; a second thread only gets in the way of the host's.
torch.set_num_threads(1)
