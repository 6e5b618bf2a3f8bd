"""Prefill in chunks of 64 tokens: what chunks can do alone runs side by side, and only states go from chunk to chunk.

With G the sum of log decays since the chunk's start and S the state before it, a chunk's updates are u = X (v - exp(G) S k),
where X = (I + A)^-1 beta, A_ij = beta_i exp(G_i - G_j) (k_i . k_j) below the diagonal; its outputs are
exp(G) S q + P u, P_ij = exp(G_i - G_j) (q_i . k_j) up to the diagonal; and the state after it is
exp(G_64) S + sum_j exp(G_64 - G_j) u_j k_j^T. So there are six kernels:

1. per chunk and head: convolution, norms of q and k (`convolutions_kernel`);
2. per chunk and value head: gates, X and P (`matrices_kernel`);
3. per request, value head and slice of values, chunk after chunk: outputs and states (`states_kernel`);
4. if there are exports: the rest of the way from a chunk's start to a token inside it (`exports_kernel`);
5. the windows after the step (`windows_kernel`), which the first kernel reads as they were before it;
6. the gated norm, over all of a head's values (`norm_kernel`).

A slot that one request writes may not be read by another in the same step; programs run in no order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.gated_delta.triton_decode import check_strides, unsupported
from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable

CHUNK = 64
CONVOLVED = 32
"""Tokens that one program of `convolutions_kernel` takes."""
SLICE = 32
"""Values that one program of `states_kernel` carries, at most."""


def when(call: Call) -> str | None:
    """Steps that keep plain float32 states, with heads whose sizes are powers of two."""
    if reason := unavailable(call.hardware):
        return reason
    if call.kwargs.get("log") is not None or call.args[12].dim() != 1:
        return "writes the state after the step, and exports, only"
    if min(call.kwargs["key_dim"], call.kwargs["value_dim"]) < 16:
        return "multiplies tiles of 16 by 16 at least"
    return unsupported(call)


def chunk_count(tokens: int, requests: int) -> int:
    """A bound of the chunks of a step, whatever its requests' lengths."""
    return min(tokens, -(-tokens // CHUNK) + requests)


def workspace(call: Call) -> int:
    """q, k, v of all tokens, and X, P, G of all chunks: bytes."""
    mixed, heads = call.args[0], call.kwargs["value_heads"]
    chunks = chunk_count(mixed.shape[0], call.args[11].shape[0])
    return mixed.nbytes + chunks * heads * CHUNK * (2 * CHUNK * mixed.element_size() + 4)


def run(
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
    log: None = None,
    log_length: Tensor | None = None,
    slice_values: int = SLICE,
    stages: int = 3,
) -> Tensor:
    """The contract of `gated_delta`. slice_values, stages: how `states_kernel` is cut."""
    from firstlight.ops.gated_delta import triton_chunked_kernels as kernels

    check_strides(mixed, z, a, b, state_pool)
    out = torch.empty(z.shape, dtype=mixed.dtype, device=mixed.device)
    tokens, channels = mixed.shape
    requests = state_in.shape[0]
    if requests == 0 or tokens == 0:
        return out
    chunks = chunk_count(tokens, requests)
    columns = torch.empty((tokens, channels), dtype=mixed.dtype, device=mixed.device)
    inverse = torch.empty((chunks, value_heads, CHUNK, CHUNK), dtype=mixed.dtype, device=mixed.device)
    scores = torch.empty_like(inverse)
    total = torch.empty((chunks, value_heads, CHUNK), dtype=torch.float32, device=mixed.device)
    exact = mixed.dtype == torch.float32
    sizes = {"HK": key_heads, "HV": value_heads, "K": key_dim, "V": value_dim, "CHUNK": CHUNK}
    block_requests = 1 << (requests - 1).bit_length()
    width = conv_weight.shape[1]
    kernels.convolutions_kernel[(2 * key_heads + value_heads, chunks * (CHUNK // CONVOLVED))](
        mixed,
        conv_weight,
        conv_pool,
        query_start,
        state_in,
        columns,
        requests,
        mixed.stride(0),
        conv_weight.stride(0),
        conv_weight.stride(1),
        *conv_pool.stride(),
        **sizes,
        W=width,
        ROWS=CONVOLVED,
        BLOCK_R=block_requests,
        num_warps=4,
    )
    kernels.matrices_kernel[(value_heads, chunks)](
        columns,
        a,
        b,
        A_log,
        dt_bias,
        query_start,
        inverse,
        scores,
        total,
        requests,
        a.stride(0),
        b.stride(0),
        **sizes,
        BLOCK_R=block_requests,
        PRECISION="ieee" if exact or torch.version.hip else "tf32",
        num_warps=4,
    )
    block_v = min(slice_values, value_dim)
    kernels.states_kernel[(value_heads * (value_dim // block_v), requests)](
        columns,
        inverse,
        scores,
        total,
        state_pool,
        query_start,
        state_in,
        state_out,
        exports,
        out,
        exports.shape[0],
        requests,
        state_pool.stride(0),
        **sizes,
        BLOCK_V=block_v,
        BLOCK_R=block_requests,
        BLOCK_E=max(1, 1 << (exports.shape[0] - 1).bit_length()) if exports.shape[0] else 1,
        HAS_EXPORTS=exports.shape[0] > 0,
        STAGES=stages,
        num_warps=4,
    )
    if exports.shape[0]:
        kernels.exports_kernel[(value_heads * (value_dim // 16), exports.shape[0])](
            columns,
            inverse,
            total,
            state_pool,
            query_start,
            exports,
            requests,
            state_pool.stride(0),
            **sizes,
            BLOCK_V=16,
            BLOCK_R=block_requests,
            num_warps=4,
        )
    block_c = min(1024, 1 << (channels - 1).bit_length())
    kernels.windows_kernel[(-(-channels // block_c), requests)](
        mixed,
        conv_pool,
        query_start,
        state_in,
        state_out,
        exports,
        exports.shape[0],
        channels,
        mixed.stride(0),
        *conv_pool.stride(),
        W=width,
        BLOCK_C=block_c,
        num_warps=4,
    )
    promoted = torch.promote_types(mixed.dtype, norm_weight.dtype)
    block_rows = max(1, min(32, 4096 // value_dim))
    kernels.norm_kernel[(-(-tokens * value_heads // block_rows),)](
        out,
        z,
        norm_weight,
        eps,
        tokens * value_heads,
        z.stride(0),
        HV=value_heads,
        V=value_dim,
        BLOCK_ROWS=block_rows,
        ROUND_PRODUCT=promoted == mixed.dtype and promoted.itemsize == 2,
        num_warps=4,
    )
    return out
