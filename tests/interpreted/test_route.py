"""route under the interpreter."""

from __future__ import annotations

import pytest
from product_checks import check_route

from firstlight.ops.route import triton_fused


@pytest.mark.parametrize(("experts", "top_k"), [(11, 3), (64, 8), (5, 5)])
def test_softmax(experts: int, top_k: int) -> None:
    check_route(triton_fused.run, "cpu", 5, experts, top_k, renormalise=True)


def test_sigmoid_with_a_bias() -> None:
    check_route(triton_fused.run, "cpu", 5, 11, 3, scoring="sigmoid", biased=True, renormalise=False, scale=2.5)
