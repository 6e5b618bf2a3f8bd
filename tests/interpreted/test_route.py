"""route under the interpreter."""

from __future__ import annotations

import pytest
import torch
from product_checks import check_route

from firstlight.ops.route import triton_fused


@pytest.mark.parametrize(("experts", "top_k"), [(11, 3), (64, 8), (5, 5)])
def test_softmax(experts: int, top_k: int) -> None:
    check_route(triton_fused.run, "cpu", 5, experts, top_k, renormalise=True)


def test_sigmoid_with_a_bias() -> None:
    check_route(triton_fused.run, "cpu", 5, 11, 3, scoring="sigmoid", biased=True, renormalise=False, scale=2.5)


@pytest.mark.parametrize("hidden_size", [48, 2500])
def test_the_shared_experts_weight(hidden_size: int) -> None:
    """A tile has 2,048 columns at most, and the first is read by itself."""
    from firstlight.ops.route.triton_fused_kernel import choose_experts

    x = torch.randn(3, hidden_size, generator=torch.Generator().manual_seed(0))
    row = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(1)) / hidden_size**0.5
    logits = torch.zeros(1, 3, 5)
    _, _, share = choose_experts(logits, 5, 2, "softmax", True, None, 1.0, None, torch.float32, gate=(x, row))
    torch.testing.assert_close(share, (x.double() @ row[0].double()).sigmoid().float(), rtol=1e-5, atol=1e-6)
