"""The two gates of the gated delta rule: how fast a head's state decays, and how much of a token is written to it."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.precision import wide_dtype


def body(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) * softplus(a + dt_bias), the logarithm of the decay; beta = sigmoid(b), the strength of the write.

    a, b: [T, HV]. A_log, dt_bias: [HV], any float dtype. HV: value heads.
    Returns (g, beta), both [T, HV] float32 (float64 if `a` is); all arithmetic in that dtype.
    Source: Gated Delta Networks (arXiv 2412.06464), section 3, as in the Qwen3-Next and Qwen3.5 model files. The model files
    round beta to the activation dtype; here it stays float32, as in the published kernels.
    """
    dtype = wide_dtype(a.dtype)
    decay = -A_log.to(dtype).exp() * softplus(a.to(dtype) + dt_bias.to(dtype))
    return decay, b.to(dtype).sigmoid()


def abstract(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Two [T, HV] in float32."""
    dtype = wide_dtype(a.dtype)
    return a.new_empty(a.shape, dtype=dtype), b.new_empty(b.shape, dtype=dtype)


def cost(shape: Shape, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Cost:
    """Both inputs once in, both gates once out."""
    heads = a.shape[1]
    return Cost(
        flops={"float32": shape.tokens * heads * 12},
        read=shape.tokens * heads * (a.element_size() + b.element_size())
        + heads * (A_log.element_size() + dt_bias.element_size()),
        written=shape.tokens * heads * 2 * wide_dtype(a.dtype).itemsize,
    )


delta_gates = Op("delta_gates", body, abstract=abstract, cost=cost)
