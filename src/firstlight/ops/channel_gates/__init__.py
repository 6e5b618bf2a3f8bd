"""Gates of a delta rule whose decay differs by channel (Kimi Delta Attention)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.precision import wide_dtype


def body(f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log[h]) * softplus(f + dt_bias), the logarithm of each channel's decay; beta = sigmoid(b).

    f: [T, HV K]. b: [T, HV]. A_log: [HV]. dt_bias: [HV K].
    Returns g [T, HV, K] and beta [T, HV] in float32 (float64 if f is); nothing is rounded on the way.
    Source: Kimi Linear (arXiv 2510.26692); the Kimi-Linear model file.
    """
    dtype = wide_dtype(f.dtype)
    g = softplus(f.to(dtype) + dt_bias.to(dtype)).unflatten(-1, (A_log.shape[0], -1))
    return -A_log.to(dtype).exp()[:, None] * g, b.to(dtype).sigmoid()


def abstract(f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """[T, HV, K] and [T, HV] in float32."""
    dtype, heads = wide_dtype(f.dtype), A_log.shape[0]
    return f.new_empty((f.shape[0], heads, f.shape[1] // heads), dtype=dtype), b.new_empty(b.shape, dtype=dtype)


def cost(shape: Shape, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Cost:
    """Both inputs once in, both gates once out."""
    channels, heads = f.shape[1], b.shape[1]
    return Cost(
        flops={"float32": shape.tokens * channels * 12},
        read=shape.tokens * (channels * f.element_size() + heads * b.element_size()) + A_log.nbytes + dt_bias.nbytes,
        written=shape.tokens * (channels + heads) * wide_dtype(f.dtype).itemsize,
    )


channel_gates = Op("channel_gates", body, abstract=abstract, cost=cost)
