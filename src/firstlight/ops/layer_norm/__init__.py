"""Layer norm, as vision towers use it."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.layer_norm import torch_fused
from firstlight.ops.op import Cost, Op, Shape


def body(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension; var is the biased variance.

    x [..., D]; weight, bias [D]. All in float32 (float64 for float64 inputs), rounded to x.dtype once.
    Returns [..., D] in x.dtype. Tolerance: 1e-6 relative in float32; one ulp of x.dtype in lower precision.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(kind)
    centred = centred - centred.mean(dim=-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    return (y * weight.to(kind) + bias.to(kind)).to(x.dtype)


def abstract(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def cost(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Cost:
    return Cost(read=x.nbytes + weight.nbytes + bias.nbytes, written=x.nbytes)


layer_norm = Op("layer_norm", body, abstract=abstract, cost=cost)
layer_norm.provide("torch_fused", torch_fused.run, when=torch_fused.when)
