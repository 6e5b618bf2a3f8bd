"""sample under the interpreter."""

from __future__ import annotations

import pytest
import torch
from product_checks import check_filtered_sample, check_sample

from firstlight.ops.sample import triton_split


@pytest.mark.parametrize("greedy", [True, False])
def test_draws_the_reference_s_tokens(greedy: bool) -> None:
    check_sample(triton_split.run, "cpu", 4, 5003, greedy)


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 3.0), (torch.float16, 0.3)], ids=["peaked", "flat"])
def test_draws_from_what_the_reference_keeps(dtype: torch.dtype, spread: float) -> None:
    """Among candidates, and in the whole row where a vocabulary larger than they are is flat."""
    check_filtered_sample(triton_split.run, "cpu", 5003, dtype, spread)
