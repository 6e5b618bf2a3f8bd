"""Prefill in chunks of 64 tokens: what chunks can do alone runs side by side, and only states go from chunk to chunk.

With G the sum of log decays since the chunk's start and S the state before it, a chunk's updates are u = X (v - exp(G) S k),
where X = (I + A)^-1 beta, A_ij = beta_i exp(G_i - G_j) (k_i . k_j) below the diagonal; its outputs are
exp(G) S q + P u, P_ij = exp(G_i - G_j) (q_i . k_j) up to the diagonal; and the state after it is
exp(G_64) S + sum_j exp(G_64 - G_j) u_j k_j^T. So there are these kernels:

1. per run of tokens: convolution, norms of q and k (`convolutions_kernel`);
2. per chunk and value head: gates, X and P (`matrices_kernel`);
3. for few long requests, which are then cut into segments: what each segment makes of any state (`transitions_kernel`), and
   from that the state that each begins with (`fold_kernel`);
4. per segment, value head and slice of values, chunk after chunk: outputs, gated norm and states (`states_kernel`);
5. the gated norm, where a slice isn't all of a head's values (`norm_kernel`);
6. if there are exports: the rest of the way from a chunk's start to a token inside it (`exports_kernel`);
7. the windows after the step (`windows_kernel`), which the first kernel reads as they were before it.

A slot that one request writes may not be read by another in the same step; programs run in no order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firstlight.ops.gated_delta.triton_decode import check_strides, raw_bytes, unsupported
from firstlight.ops.op import Call
from firstlight.ops.triton_support import cannot_emit, power_of_two, register_limit, request_block, unavailable
from firstlight.quant import Emission, Weight, empty_result

CHUNK = 64
LARGEST_WIDTH = 4
"""Taps of the convolution that `convolutions_kernel` holds."""
CONVOLVED = 32
"""Tokens that one program of `convolutions_kernel` takes."""
MULTIPROCESSORS = 132
"""Of an H200. A program of `states_kernel` has one to itself, or two share it."""
FOLDED = 16
"""Values that one program of `fold_kernel` takes."""
SHORTEST_SEGMENT = 8
"""Chunks of a segment: below, what is done twice isn't worth it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How states are cut: programs take `values` of a head's values and `1 / segments` of a request, fetched `stages` ahead.

    norm: whether they apply the gated norm, for which they have to take all values.
    """

    values: int
    warps: int
    stages: int
    segments: int = 1
    norm: bool = False


def choose_cut(
    tokens: int,
    requests: int,
    value_heads: int,
    value_dim: int,
    max_query: int,
    *,
    exact: bool,
    hip: bool | None = None,
) -> Cut:
    """All of a head's values where heads fill the card, else half of them, and segments if there is room for more.

    A step's requests may be padding: as many count as could be of the largest size. Two segments cost half a request more
    and save half; with more of them the states at their starts have to be folded. exact: for float32. hip: for AMD, by
    default if torch is; there the shared memory holds one chunk.
    """
    if exact:
        return Cut(min(16, value_dim), 4, 1)
    stages = 1 if (torch.version.hip is not None if hip is None else hip) else 3
    heads = value_heads * min(requests, max(1, tokens // max(1, max_query)))
    if heads * 2 > MULTIPROCESSORS:
        return Cut(value_dim, 8 if value_dim > 64 else 4, stages)
    room = min(MULTIPROCESSORS // (2 * heads), max_query // (CHUNK * SHORTEST_SEGMENT))
    segments = 4 if room >= 4 else 2 if room >= 2 else 1
    return Cut(min(64, value_dim), 4, stages, segments)


def when(call: Call) -> str | None:
    """Steps that keep plain states, with heads whose sizes are powers of two."""
    if reason := unavailable(call.hardware):
        return reason
    if call.kwargs.get("log") is not None or call.args[12].dim() != 1:
        return "writes the state after the step, and exports, only"
    if min(call.kwargs["key_dim"], call.kwargs["value_dim"]) < 16:
        return "multiplies tiles of 16 by 16 at least"
    if call.args[4].shape[1] > LARGEST_WIDTH:
        return f"convolves with {LARGEST_WIDTH} taps at most, not {call.args[4].shape[1]}"
    return unsupported(call) or cannot_emit(call, call.kwargs["value_dim"])


def chunk_count(tokens: int, requests: int) -> int:
    """A bound of the chunks of a step, whatever its requests' lengths."""
    return min(tokens, -(-tokens // CHUNK) + requests)


def segment_length(max_query: int, segments: int) -> int:
    """Chunks of a segment."""
    return -(-max(1, -(-max_query // CHUNK)) // segments)


def segment_rows(chunks: int, max_query: int, segments: int) -> int:
    """A bound of the segments of all requests that have more than one."""
    return 2 * chunks // segment_length(max_query, segments) if segments > 1 else 0


def workspace(call: Call) -> int:
    """q, k, v of all tokens, X, P and decays of all chunks, states and transitions of all segments, raw outputs: bytes."""
    mixed, requests, heads = call.args[0], call.args[11].shape[0], call.kwargs["value_heads"]
    key_dim, value_dim = call.kwargs["key_dim"], call.kwargs["value_dim"]
    chunks = chunk_count(mixed.shape[0], requests)
    cut = choose_cut(
        mixed.shape[0], requests, heads, value_dim, call.kwargs["max_query"], exact=mixed.dtype == torch.float32
    )
    rows = segment_rows(chunks, call.kwargs["max_query"], cut.segments)
    states = rows * heads * (value_dim + key_dim) * key_dim * 4
    return raw_bytes(call) + mixed.nbytes + chunks * heads * CHUNK * (2 * CHUNK * mixed.element_size() + 16) + states


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
    emit: Emission | None = None,
    cut: Cut | None = None,
) -> Weight:
    """The contract of `gated_delta`. cut: instead of `choose_cut`."""
    from firstlight.ops.gated_delta import triton_chunked_kernels as kernels
    from firstlight.ops.gated_delta import triton_states_kernels as states

    check_strides(mixed, z, a, b, state_pool)
    out = torch.empty(z.shape, dtype=mixed.dtype, device=mixed.device)
    tokens, channels = mixed.shape
    requests = state_in.shape[0]
    if requests == 0 or tokens == 0:
        return empty_result(mixed, z.shape, emit)
    exact = mixed.dtype == torch.float32
    cut = cut or choose_cut(tokens, requests, value_heads, value_dim, max_query, exact=exact)
    if emit is not None:
        cut = replace(cut, norm=False)
    chunks = chunk_count(tokens, requests)
    columns = torch.empty((tokens, channels), dtype=mixed.dtype, device=mixed.device)
    inverse = torch.empty((chunks, value_heads, CHUNK, CHUNK), dtype=mixed.dtype, device=mixed.device)
    scores = torch.empty_like(inverse)
    decays = torch.empty((chunks, value_heads, 4, CHUNK), dtype=torch.float32, device=mixed.device)
    sizes = {"HK": key_heads, "HV": value_heads, "K": key_dim, "V": value_dim, "CHUNK": CHUNK}
    per_request = {"BLOCK_R": request_block(requests)}
    # 32 at least, as with `request_block`; at 64 the kernel of states spills more registers.
    block_exports = max(32, power_of_two(exports.shape[0])) if exports.shape[0] else 1
    width = conv_weight.shape[1]
    promoted = torch.promote_types(mixed.dtype, norm_weight.dtype)
    round_product = promoted == mixed.dtype and promoted.itemsize == 2
    key_block, value_block = heads_together(key_heads, key_dim), heads_together(value_heads, value_dim)
    kernels.convolutions_kernel[
        (2 * key_heads // key_block + value_heads // value_block, chunks * (CHUNK // CONVOLVED))
    ](
        mixed,
        conv_weight,
        conv_pool,
        query_start,
        state_in,
        columns,
        requests,
        mixed.stride(0),
        *conv_weight.stride(),
        *conv_pool.stride(),
        **sizes,
        **per_request,
        W=width,
        KEY_HEADS=key_block,
        VALUE_HEADS=value_block,
        TOKENS=CONVOLVED,
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
        decays,
        requests,
        a.stride(0),
        b.stride(0),
        **sizes,
        **per_request,
        EXACT=exact,
        num_warps=4,
        **register_limit(0 if exact else 128),
    )
    # By bounds of a step's size only, as launches have to be; a request's own segments may be fewer.
    segment_chunks = segment_length(max_query, cut.segments)
    rows = segment_rows(chunks, max_query, cut.segments)
    starts = torch.empty((rows, value_heads, value_dim, key_dim), dtype=torch.float32, device=mixed.device)
    if cut.segments > 1:
        transitions = starts.new_empty((rows, value_heads, key_dim, key_dim))
        block = min(64, value_dim, key_dim)
        states.transitions_kernel[(value_heads * ((value_dim + key_dim) // block), requests, cut.segments - 1)](
            columns,
            inverse,
            decays,
            state_pool,
            query_start,
            state_in,
            starts,
            transitions,
            requests,
            segment_chunks,
            state_pool.stride(0),
            **sizes,
            **per_request,
            BLOCK=block,
            num_warps=4,
            num_stages=cut.stages,
        )
        states.fold_kernel[(value_heads * (value_dim // FOLDED), requests)](
            state_pool,
            query_start,
            state_in,
            starts,
            transitions,
            segment_chunks,
            state_pool.stride(0),
            HV=value_heads,
            K=key_dim,
            V=value_dim,
            CHUNK=CHUNK,
            BLOCK=FOLDED,
            **per_request,
            PRECISION="ieee" if exact or torch.version.hip else "tf32",
            num_warps=8,
        )
    states.states_kernel[(value_heads * (value_dim // cut.values), requests, cut.segments)](
        columns,
        inverse,
        scores,
        decays,
        z,
        norm_weight,
        state_pool,
        query_start,
        state_in,
        state_out,
        exports,
        starts,
        out,
        eps,
        exports.shape[0],
        requests,
        segment_chunks,
        z.stride(0),
        state_pool.stride(0),
        **sizes,
        **per_request,
        BLOCK_V=cut.values,
        BLOCK_E=block_exports,
        HAS_EXPORTS=exports.shape[0] > 0,
        HAS_SEGMENTS=cut.segments > 1,
        NORM=cut.norm,
        ROUND_PRODUCT=round_product,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if exports.shape[0]:
        export_values = min(32, value_dim)
        states.exports_kernel[(value_heads * (value_dim // export_values), exports.shape[0])](
            columns,
            decays,
            state_pool,
            query_start,
            exports,
            requests,
            state_pool.stride(0),
            **sizes,
            **per_request,
            BLOCK_V=export_values,
            num_warps=4,
        )
    block_c = min(1024, power_of_two(channels))
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
        BLOCK_E=block_exports,
        num_warps=4,
    )
    if cut.norm:
        return out
    block_rows = max(1, min(32, 4096 // value_dim))
    result = kernels.gated_result(out, emit)
    kernels.gate_outputs(out, z, norm_weight, eps, result, value_heads, block_rows, round_product, PDL=False)
    return result


def heads_together(heads: int, dim: int) -> int:
    """Heads that a program convolves: a power of two that divides them, of 512 channels at most."""
    return min(heads & -heads, max(1, 512 // dim))
