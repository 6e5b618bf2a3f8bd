"""SwiGLU's middle: the activated gate times the other half."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.silu_mul import triton_fused


def body(x: Tensor) -> Tensor:
    """out = silu(gate) * up, where x = gate | up along the last dimension.

    x [T, 2 I]. silu is in float32 and rounded to x.dtype; then the product is rounded.
    Returns [T, I] in x.dtype. Tolerance: 1e-6 relative in float32; two ulps of x.dtype in lower precision.
    Source: transformers `LlamaMLP`.
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def abstract(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def cost(shape: Shape, x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes / 2)


silu_mul = Op("silu_mul", body, abstract=abstract, cost=cost)
silu_mul.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2)
