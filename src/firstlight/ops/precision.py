"""The dtype in which references compute."""

from __future__ import annotations

import torch


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float64 if any of the dtypes is float64 (the tests' yardstick), else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
