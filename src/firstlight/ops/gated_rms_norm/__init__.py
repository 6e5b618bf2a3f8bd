"""The norm of Gated DeltaNet's output: RMS norm first, then the gate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.ops.gated_rms_norm import triton_fused
from firstlight.ops.op import Cost, Op, Shape


def body(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """out = rms_norm(x) * weight * silu(gate), over the last dimension.

    x, gate [..., D] of one shape, any strides; weight [D] (not zero-centred). The norm is in float32 and is rounded to
    x.dtype; the product with the weight is rounded to the wider of x's and the weight's dtypes; the product with
    silu(gate), in float32, is rounded to x.dtype. (float64 in place of float32 for float64 inputs.)
    Returns [..., D] in x.dtype. Tolerance: 1e-6 relative in float32; two ulps of x.dtype in lower precision.
    Source: transformers `Qwen3NextRMSNormGated`.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(kind)
    y = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype) * functional.silu(gate.to(kind))).to(x.dtype)


def abstract(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def cost(shape: Shape, x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Cost:
    return Cost(read=x.nbytes + gate.nbytes + weight.nbytes, written=x.nbytes)


gated_rms_norm = Op("gated_rms_norm", body, abstract=abstract, cost=cost)
gated_rms_norm.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2)
