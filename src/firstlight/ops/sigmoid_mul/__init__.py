"""An output gate: x times the sigmoid of another projection."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.sigmoid_mul import triton_fused


def body(x: Tensor, gate: Tensor) -> Tensor:
    """out = x * sigmoid(gate).

    x [T, N]; gate [T, N], or [T, 1]: one gate a token. The sigmoid is in float32 and rounded to gate.dtype; then the
    product is rounded. Returns [T, N] in x.dtype. Tolerance: 1e-6 relative in float32; two ulps in lower precision.
    Source: transformers `Qwen3NextAttention`, `Qwen3NextSparseMoeBlock`.
    """
    return (x * torch.sigmoid(gate)).to(x.dtype)


def abstract(x: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def cost(shape: Shape, x: Tensor, gate: Tensor) -> Cost:
    return Cost(read=x.nbytes + gate.nbytes, written=x.nbytes)


sigmoid_mul = Op("sigmoid_mul", body, abstract=abstract, cost=cost)
sigmoid_mul.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2)
