"""Kernels under Triton's interpreter: on the CPU, with NumPy. Nothing is collected where triton isn't installed."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from firstlight.hardware.detect import triton_is_installed

collect_ignore_glob = [] if triton_is_installed() else ["test_*.py"]
