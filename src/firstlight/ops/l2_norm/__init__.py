"""Scaling rows to unit length."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.precision import wide_dtype


def body(x: Tensor, *, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
    """y = x * rsqrt(sum(x^2) + eps) * scale over the last dimension.

    x: [T, ..., D], any strides. Returns the same shape in x.dtype, contiguous; float32 inside (float64 if x is), one cast.
    eps is added to the sum of squares, not to their mean.
    Source: the query and key norm of the gated delta rule in the Qwen3-Next and Qwen3.5 model files.
    """
    wide = x.to(wide_dtype(x.dtype))
    return (wide * ((wide * wide).sum(-1, keepdim=True) + eps).rsqrt() * scale).to(x.dtype).contiguous()


def abstract(x: Tensor, *, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
    """The shape of x."""
    return x.new_empty(x.shape)


def cost(shape: Shape, x: Tensor, *, eps: float = 1e-6, scale: float = 1.0) -> Cost:
    """x once in and once out."""
    elements = shape.tokens * x[0].numel()
    return Cost(flops={"float32": elements * 4}, read=elements * x.element_size(), written=elements * x.element_size())


l2_norm = Op("l2_norm", body, abstract=abstract, cost=cost)
