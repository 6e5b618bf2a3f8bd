"""Gated DeltaNet between its projections: convolution, gates, normalised keys, delta rule, gated norm."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from firstlight.ops.causal_conv import causal_conv
from firstlight.ops.delta_gates import delta_gates
from firstlight.ops.gated_delta import triton_chunked, triton_decode
from firstlight.ops.gated_delta_rule import DeltaLog, gated_delta_rule
from firstlight.ops.gated_rms_norm import gated_rms_norm
from firstlight.ops.l2_norm import l2_norm
from firstlight.ops.op import Op
from firstlight.quant import Emission, Weight, emitted, empty_result


def body(
    parts: SimpleNamespace,
    mixed: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    query_start: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    exports: Tensor,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    eps: float,
    max_query: int,
    log: DeltaLog | None = None,
    log_length: Tensor | None = None,
    emit: Emission | None = None,
) -> Weight:
    """q | k | v = causal_conv(mixed); y = gated_rms_norm(gated_delta_rule(l2(q) / sqrt(K), l2(k), v, gates), z).

    mixed: [T, C], raw projections q | k | v, C = 2 HK K + HV V. z: [T, HV V]. a, b: [T, HV]. conv_weight: [C, W].
    A_log, dt_bias: [HV]. norm_weight: [V]. conv_pool: [slots, C, W - 1] and state_pool: [slots, HV, V, K] float32 or bfloat16,
    one slot for both, written in place. The rest as in `gated_delta_rule`; `log` holds the convolution's columns as well.
    key_heads, value_heads, key_dim, value_dim: HK, HV, K, V of this rank. eps: of the gated norm; l2 norms have 1e-6.
    Returns [T, HV V] in mixed.dtype, or with `emit` (HV V in whole groups) what that quantises to. Rounded to mixed.dtype: the
    convolution, normalised q and k, o, and as the norm says.
    Source: Gated Delta Networks (arXiv 2412.06464); the Qwen3-Next and Qwen3.5 model files.
    """
    conv_log = None if log is None else log.conv
    columns = parts.causal_conv(
        mixed,
        conv_weight,
        conv_pool,
        query_start,
        state_in,
        state_out,
        exports,
        max_query=max_query,
        log=conv_log,
        log_length=log_length,
    )
    q, k, v = columns.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], dim=-1)
    q = parts.l2_norm(q.unflatten(-1, (key_heads, key_dim)), eps=1e-6, scale=key_dim**-0.5)
    k = parts.l2_norm(k.unflatten(-1, (key_heads, key_dim)), eps=1e-6)
    v = v.unflatten(-1, (value_heads, value_dim))
    g, beta = parts.delta_gates(a, b, A_log, dt_bias)
    o = parts.gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        query_start,
        state_in,
        state_out,
        exports,
        max_query=max_query,
        log=log,
        log_length=log_length,
    )
    y = parts.gated_rms_norm(o, z.unflatten(-1, (value_heads, value_dim)), norm_weight, eps=eps).flatten(1)
    return emitted(y, emit)


def abstract(mixed: Tensor, z: Tensor, *args: object, emit: Emission | None = None, **kwargs: object) -> Weight:
    """[T, HV V] in mixed.dtype, or as `emit` asks for it."""
    return empty_result(mixed, z.shape, emit)


gated_delta = Op(
    "gated_delta",
    body,
    abstract=abstract,
    parts=(causal_conv, delta_gates, l2_norm, gated_delta_rule, gated_rms_norm),
    mutates={"conv_pool": "state_out", "state_pool": "state_out", "log": "state_in"},
)
gated_delta.provide(
    "triton_chunked",
    triton_chunked.run,
    when=triton_chunked.when,
    rank=4,
    workspace=triton_chunked.workspace,
    emits=True,
)
gated_delta.provide(
    "triton_decode",
    triton_decode.run,
    when=triton_decode.when,
    rank=5,
    workspace=triton_decode.workspace,
    emits=True,
)
