"""l2_norm against its formula."""

from __future__ import annotations

import pytest
import torch

from firstlight.ops.l2_norm import l2_norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_is_the_formula_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(5, 90, generator=torch.Generator().manual_seed(0)).to(dtype)[:, 7:49].unflatten(1, (3, 14))
    y = l2_norm(x, scale=0.3)
    exact = x.double() * 0.3 / ((x.double() ** 2).sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(y, exact.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert y.is_contiguous()


def test_eps_is_added_to_the_sum() -> None:
    """Rows of zeros stay zeros; a row as small as eps is halved in power."""
    x = torch.zeros(2, 16)
    x[1, 3] = 1e-3
    torch.testing.assert_close(l2_norm(x, eps=1e-6), x * 1e3 * 0.5**0.5)


def test_large_float16_values_do_not_overflow() -> None:
    x = torch.full((1, 16), 6e4, dtype=torch.float16)
    torch.testing.assert_close(l2_norm(x), torch.full_like(x, 0.25))
