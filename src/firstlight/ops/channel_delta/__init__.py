"""A Kimi Delta Attention mixer between its projections: convolution, gates, and the recurrence."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from firstlight.ops.causal_conv import causal_conv
from firstlight.ops.channel_delta_rule import channel_delta_rule
from firstlight.ops.channel_gates import channel_gates
from firstlight.ops.l2_norm import l2_norm
from firstlight.ops.op import Op


def body(
    parts: SimpleNamespace,
    mixed: Tensor,
    f: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    query_start: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    exports: Tensor,
    *,
    heads: int,
    dim: int,
    max_query: int,
) -> Tensor:
    """q | k | v = causal_conv(mixed); o = channel_delta_rule(l2(q) / sqrt(K), l2(k), v, gates of f and b).

    mixed: [T, 3 H K], raw projections q | k | v. f: [T, H K]. b: [T, H]. conv_weight: [3 H K, W]. A_log: [H]. dt_bias: [H K].
    conv_pool: [slots, 3 H K, W - 1] and state_pool: [slots, H, K, K] float32 or bfloat16, one slot for both, written in place. The rest
    as in `gated_delta_rule`. heads, dim: H, K of this rank. l2 norms have eps 1e-6.
    Returns [T, H, K] in mixed.dtype. Rounded to mixed.dtype: the convolution, normalised q and k, and o.
    Source: Kimi Linear (arXiv 2510.26692) and its model file.
    """
    slots = (query_start, state_in, state_out, exports)
    columns = parts.causal_conv(mixed, conv_weight, conv_pool, *slots, max_query=max_query)
    q, k, v = (part.unflatten(-1, (heads, dim)) for part in columns.chunk(3, dim=-1))
    q, k = parts.l2_norm(q, eps=1e-6, scale=dim**-0.5), parts.l2_norm(k, eps=1e-6)
    g, beta = parts.channel_gates(f, b, A_log, dt_bias)
    o: Tensor = parts.channel_delta_rule(q, k, v, g, beta, state_pool, *slots, max_query=max_query)
    return o


def abstract(mixed: Tensor, *args: object, heads: int, dim: int, **kwargs: object) -> Tensor:
    """[T, H, K] in mixed.dtype."""
    return mixed.new_empty((mixed.shape[0], heads, dim))


channel_delta = Op(
    "channel_delta",
    body,
    abstract=abstract,
    parts=(causal_conv, l2_norm, channel_gates, channel_delta_rule),
    mutates={"conv_pool": "state_out", "state_pool": "state_out"},
)
