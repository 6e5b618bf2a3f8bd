"""An output gate: x times the sigmoid of another projection."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.sigmoid_mul import triton_fused
from firstlight.quant import Emission, Weight, emitted, empty_result, result_bytes


def body(x: Tensor, gate: Tensor, *, emit: Emission | None = None) -> Weight:
    """out = x * sigmoid(gate).

    x [T, N]; gate [T, N], or [T, 1]: one gate a token. The sigmoid is in float32 and rounded to gate.dtype; then the
    product is rounded. Returns [T, N] in x.dtype, or with `emit` (N in whole groups) what that quantises to.
    Tolerance: 1e-6 relative in float32; two ulps in lower precision; quantising adds none.
    Source: transformers `Qwen3NextAttention`, `Qwen3NextSparseMoeBlock`.
    """
    return emitted((x * torch.sigmoid(gate)).to(x.dtype), emit)


def abstract(x: Tensor, gate: Tensor, *, emit: Emission | None = None) -> Weight:
    return empty_result(x, x.shape, emit)


def cost(shape: Shape, x: Tensor, gate: Tensor, *, emit: Emission | None = None) -> Cost:
    return Cost(read=x.nbytes + gate.nbytes, written=result_bytes(x, x.shape, emit))


sigmoid_mul = Op("sigmoid_mul", body, abstract=abstract, cost=cost)
sigmoid_mul.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2, emits=True)
