"""Norms, gates and copies under the interpreter."""

from __future__ import annotations

import pytest
import torch
from product_checks import check_copies, check_rows


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_rows(dtype: torch.dtype, tolerance: float, zero_centred: bool) -> None:
    check_rows("cpu", dtype, 3, 4, 72, tolerance, zero_centred)


def test_copies() -> None:
    check_copies("cpu", 9, 70)
