"""delta_gates against its formula, and at the ends of its range."""

from __future__ import annotations

import torch

from firstlight.ops.delta_gates import delta_gates


def test_is_the_formula_in_low_precision_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 7, generator=generator).bfloat16() for _ in range(2))
    A_log, dt_bias = torch.randn(7, generator=generator), torch.randn(7, generator=generator).bfloat16()
    g, beta = delta_gates(a, b, A_log, dt_bias)
    assert g.dtype == beta.dtype == torch.float32
    expected = -A_log.double().exp() * torch.log1p((a.double() + dt_bias.double()).exp())
    torch.testing.assert_close(g, expected.float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(beta, (1 / (1 + (-b.double()).exp())).float(), rtol=1e-6, atol=0)


def test_large_inputs_neither_overflow_nor_lose_their_sign() -> None:
    a, zero = torch.tensor([[-1e4, 0.0, 1e4]]), torch.zeros(3)
    g, beta = delta_gates(a, a, zero, zero)
    torch.testing.assert_close(g, torch.tensor([[0.0, -(torch.tensor(2.0).log()), -1e4]]))
    torch.testing.assert_close(beta, torch.tensor([[0.0, 0.5, 1.0]]))
