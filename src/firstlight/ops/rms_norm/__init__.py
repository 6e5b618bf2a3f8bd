"""Root-mean-square norm, in the two roundings that published models use."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.rms_norm import torch_fused, triton_fused
from firstlight.quant import Emission, Weight, emitted, empty_result, result_bytes


def body(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool = False, emit: Emission | None = None) -> Weight:
    """y = x / sqrt(mean(x^2) + eps), scaled by the weight; over the last dimension.

    x [..., D], any strides; weight [D]. The mean and the division are in float32 (float64 for float64 inputs).
    zero_centred False (Llama, Qwen3): out = weight * cast(y): y is rounded to x.dtype, then the product.
    zero_centred True (Qwen3-Next, Qwen3.5): out = cast(y * (1 + weight)): all in float32, rounded once.
    Returns [..., D] in x.dtype, or with `emit` (x [T, D], D in whole groups) what that quantises to.
    Tolerance: 1e-6 relative in float32; one ulp of x.dtype in lower precision; quantising adds none.
    Source: transformers `LlamaRMSNorm`, `Qwen3NextRMSNorm`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    y = y * (1 + weight.to(y.dtype)) if zero_centred else y.to(x.dtype) * weight
    return emitted(y.to(x.dtype), emit)


def abstract(
    x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool = False, emit: Emission | None = None
) -> Weight:
    return empty_result(x, x.shape, emit)


def cost(
    shape: Shape, x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool = False, emit: Emission | None = None
) -> Cost:
    """Bytes only: a few operations an element never bound it."""
    return Cost(read=x.nbytes + weight.nbytes, written=result_bytes(x, x.shape, emit))


rms_norm = Op("rms_norm", body, abstract=abstract, cost=cost)
rms_norm.provide("torch_fused", torch_fused.run, when=torch_fused.when)
rms_norm.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2, emits=True)
