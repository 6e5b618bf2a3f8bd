"""Gaussian error linear unit."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from firstlight.ops.op import Cost, Op, Shape


def body(x: Tensor, *, approximate: str) -> Tensor:
    """out = x * Phi(x), with Phi the normal distribution's cumulative function.

    x [...]. approximate "none": Phi by erf; "tanh": x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))); RuntimeError for
    any other. In float32 (float64 for float64 inputs), rounded to x.dtype once.
    Returns [...] in x.dtype. Tolerance: 1e-6 absolute in float32; one ulp of x.dtype in lower precision.
    """
    return functional.gelu(x, approximate=approximate)


def abstract(x: Tensor, *, approximate: str) -> Tensor:
    return x.new_empty(x.shape)


def cost(shape: Shape, x: Tensor, *, approximate: str) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes)


gelu = Op("gelu", body, abstract=abstract, cost=cost)
