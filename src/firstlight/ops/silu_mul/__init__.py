"""SwiGLU's middle: the activated gate times the other half."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.silu_mul import triton_fused
from firstlight.quant import Emission, Weight, emitted, empty_result, result_bytes


def body(x: Tensor, *, emit: Emission | None = None) -> Weight:
    """out = silu(gate) * up, where x = gate | up along the last dimension.

    x [T, 2 I]. silu is in float32 and rounded to x.dtype; then the product is rounded.
    Returns [T, I] in x.dtype, or with `emit` (I in whole groups) what that quantises to.
    Tolerance: 1e-6 relative in float32; two ulps of x.dtype in lower precision; quantising adds none.
    Source: transformers `LlamaMLP`.
    """
    gate, up = x.chunk(2, dim=-1)
    return emitted(functional.silu(gate) * up, emit)


def abstract(x: Tensor, *, emit: Emission | None = None) -> Weight:
    return empty_result(x, (*x.shape[:-1], x.shape[-1] // 2), emit)


def cost(shape: Shape, x: Tensor, *, emit: Emission | None = None) -> Cost:
    return Cost(read=x.nbytes, written=result_bytes(x, (*x.shape[:-1], x.shape[-1] // 2), emit))


silu_mul = Op("silu_mul", body, abstract=abstract, cost=cost)
silu_mul.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2, emits=True)
