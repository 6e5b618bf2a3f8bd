"""Inputs for the tests of ops that keep one state a request."""

from __future__ import annotations

import torch
from torch import Tensor


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(counts: list[int]) -> Tensor:
    """[R + 1] cumulative, from the tokens of each request."""
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def export_rows(*rows: tuple[int, int, int]) -> Tensor:
    """[n, 3] rows (request, number of tokens, slot)."""
    return torch.tensor(rows, dtype=torch.int32).view(-1, 3)


def poisoned(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A pool whose rows belong to nobody."""
    return torch.full(shape, float("nan"), dtype=dtype)


def rule_inputs(
    tokens: int,
    *,
    key_heads: int = 2,
    value_heads: int = 6,
    key_dim: int = 16,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    padding: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, g, beta) as a layer makes them; `padding` more tokens of NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = torch.nn.functional.normalize(normal(tokens, key_heads, key_dim), dim=-1) * key_dim**-0.5
    k = torch.nn.functional.normalize(normal(tokens, key_heads, key_dim), dim=-1)
    v = normal(tokens, value_heads, value_dim)
    g = -normal(tokens, value_heads).exp() * 0.3
    beta = normal(tokens, value_heads).sigmoid()
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = (q.to(dtype), k.to(dtype), v.to(dtype), g.to(gate), beta.to(gate))
    return tuple(torch.cat([x, x.new_full((padding, *x.shape[1:]), float("nan"))]) for x in inputs)  # type: ignore[return-value]


def worst_row_error(actual: Tensor, expected: Tensor) -> float:
    """Largest RMS error of a row (first dimension) relative to the RMS of all that is expected. NaN anywhere is NaN."""
    error = (actual.double() - expected.double()).flatten(1).square().mean(1).sqrt().max()
    return float(error / expected.double().square().mean().sqrt())
