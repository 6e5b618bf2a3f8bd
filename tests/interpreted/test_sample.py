"""sample under the interpreter."""

from __future__ import annotations

import pytest
from product_checks import check_sample

from firstlight.ops.sample import triton_split


@pytest.mark.parametrize("greedy", [True, False])
def test_draws_the_reference_s_tokens(greedy: bool) -> None:
    check_sample(triton_split.run, "cpu", 4, 5003, greedy)
