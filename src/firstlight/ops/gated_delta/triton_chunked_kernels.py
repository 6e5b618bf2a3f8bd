"""The kernels of `triton_chunked`. Letters: T tokens, HK and HV heads, K and V their sizes, W taps of the convolution."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from firstlight.ops.gated_delta.triton_decode_kernel import LOG2_E, find_export, silu, softplus
from firstlight.ops.linear.triton_quantise import packed_arguments, plain_part, store_packed
from firstlight.ops.triton_launch import kernel
from firstlight.ops.triton_support import cdiv
from firstlight.quant import Emission, Weight
from firstlight.quant.activations import empty_packed


@triton.jit
def chunks_before(query_start_ptr, requests, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr):
    """(request, chunks of it and of those before it) for all requests."""
    o_r = tl.arange(0, BLOCK_R)
    inside = o_r < requests
    begin = tl.load(query_start_ptr + o_r, mask=inside, other=0).to(tl.int32)
    end = tl.load(query_start_ptr + o_r + 1, mask=inside, other=0).to(tl.int32)
    return o_r, tl.cumsum((end - begin + CHUNK - 1) // CHUNK, 0)


@triton.jit
def find_chunk(query_start_ptr, requests, i_n, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr):
    """(request, chunk of it, its first token, its tokens) of the step's i_n-th chunk; the request is R past the last."""
    o_r, ends = chunks_before(query_start_ptr, requests, BLOCK_R, CHUNK)
    i_r = tl.sum(((ends <= i_n) & (o_r < requests)).to(tl.int32), 0)
    i_c = i_n - tl.max(tl.where(o_r < i_r, ends, 0), 0)
    known = i_r < requests
    first = tl.load(query_start_ptr + i_r, mask=known, other=0).to(tl.int64)
    end = tl.load(query_start_ptr + i_r + 1, mask=known, other=0).to(tl.int64)
    return i_r, i_c, first, (end - first).to(tl.int32)


@triton.jit
def load_column(x_ptr, window_ptr, o_c, i, has_window, x_stride_t, conv_stride_c, conv_stride_w, W: tl.constexpr):
    """A request's raw column i, in float32: of the window where i < 0, of zeros where i < 1 - W."""
    x = tl.load(x_ptr + i.to(tl.int64) * x_stride_t + o_c, mask=(i >= 0) & (o_c >= 0), other=0.0).to(tl.float32)
    o_w = i + W - 1
    older = (i < 0) & (o_w >= 0) & has_window & (o_c >= 0)
    held = tl.load(window_ptr + o_c * conv_stride_c + o_w * conv_stride_w, mask=older, other=0.0).to(tl.float32)
    return tl.where(i >= 0, x, held)


@triton.jit
def load_tap(weight_ptr, o_c, j: tl.constexpr, weight_stride_c, weight_stride_w, W: tl.constexpr):
    """Tap j of four, the first 4 - W of which are zeros."""
    if j + W < 4:
        return tl.zeros(o_c.shape, tl.float32)
    return tl.load(weight_ptr + o_c * weight_stride_c + (j + W - 4) * weight_stride_w).to(tl.float32)


@triton.jit
def convolve_token(w0, w1, w2, w3, x0, x1, x2, x3, scale, D: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr):
    """silu of the convolution at one token; with NORM, heads of D channels scaled to `scale`."""
    y = silu(w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3).to(dtype)
    if NORM:
        heads = tl.reshape(y.to(tl.float32), [y.shape[0] // D, D])
        heads *= (tl.rsqrt(tl.sum(heads * heads, 1) + 1e-6) * scale)[:, None]
        y = tl.reshape(heads, y.shape).to(dtype)
    return y


@triton.jit
def convolve_tokens(
    x_ptr,
    y_ptr,
    weight_ptr,
    window_ptr,
    o_c,
    begin,
    end,
    has_window,
    scale,
    x_stride_t,
    weight_stride_c,
    weight_stride_w,
    conv_stride_c,
    conv_stride_w,
    C: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    NORM: tl.constexpr,
):
    """`convolve_token` for a request's tokens from `begin` to `end`. x_ptr, y_ptr: the request's first token.

    A thread keeps its channels' taps and last columns, so that each number is read once. Tokens go by in fours, the next four
    being asked for before these are stored: no compiler moves a read across a write that it can't tell apart from it.
    """
    w0 = load_tap(weight_ptr, o_c, 0, weight_stride_c, weight_stride_w, W)
    w1 = load_tap(weight_ptr, o_c, 1, weight_stride_c, weight_stride_w, W)
    w2 = load_tap(weight_ptr, o_c, 2, weight_stride_c, weight_stride_w, W)
    w3 = load_tap(weight_ptr, o_c, 3, weight_stride_c, weight_stride_w, W)
    x0 = load_column(x_ptr, window_ptr, o_c, begin - 3, has_window, x_stride_t, conv_stride_c, conv_stride_w, W)
    x1 = load_column(x_ptr, window_ptr, o_c, begin - 2, has_window, x_stride_t, conv_stride_c, conv_stride_w, W)
    x2 = load_column(x_ptr, window_ptr, o_c, begin - 1, has_window, x_stride_t, conv_stride_c, conv_stride_w, W)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    some = o_c >= 0
    x_ptr += begin.to(tl.int64) * x_stride_t
    y_ptr += begin.to(tl.int64) * C
    next3 = tl.load(x_ptr + o_c, mask=(begin < end) & some, other=0.0)
    next4 = tl.load(x_ptr + x_stride_t + o_c, mask=(begin + 1 < end) & some, other=0.0)
    next5 = tl.load(x_ptr + 2 * x_stride_t + o_c, mask=(begin + 2 < end) & some, other=0.0)
    next6 = tl.load(x_ptr + 3 * x_stride_t + o_c, mask=(begin + 3 < end) & some, other=0.0)
    for i in range(begin, end, 4):
        x3 = next3.to(tl.float32)
        x4 = next4.to(tl.float32)
        x5 = next5.to(tl.float32)
        x6 = next6.to(tl.float32)
        x_ptr += 4 * x_stride_t
        next3 = tl.load(x_ptr + o_c, mask=(i + 4 < end) & some, other=0.0)
        next4 = tl.load(x_ptr + x_stride_t + o_c, mask=(i + 5 < end) & some, other=0.0)
        next5 = tl.load(x_ptr + 2 * x_stride_t + o_c, mask=(i + 6 < end) & some, other=0.0)
        next6 = tl.load(x_ptr + 3 * x_stride_t + o_c, mask=(i + 7 < end) & some, other=0.0)
        y = convolve_token(w0, w1, w2, w3, x0, x1, x2, x3, scale, D, NORM, dtype)
        tl.store(y_ptr + o_c, y, mask=some)
        y = convolve_token(w0, w1, w2, w3, x1, x2, x3, x4, scale, D, NORM, dtype)
        tl.store(y_ptr + C + o_c, y, mask=(i + 1 < end) & some)
        y = convolve_token(w0, w1, w2, w3, x2, x3, x4, x5, scale, D, NORM, dtype)
        tl.store(y_ptr + 2 * C + o_c, y, mask=(i + 2 < end) & some)
        y = convolve_token(w0, w1, w2, w3, x3, x4, x5, x6, scale, D, NORM, dtype)
        tl.store(y_ptr + 3 * C + o_c, y, mask=(i + 3 < end) & some)
        y_ptr += 4 * C
        x0 = x4
        x1 = x5
        x2 = x6


@kernel
def convolutions_kernel(
    mixed_ptr,
    conv_weight_ptr,
    conv_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    columns_ptr,
    requests,
    mixed_stride_t,
    weight_stride_c,
    weight_stride_w,
    conv_stride_slot,
    conv_stride_c,
    conv_stride_w,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    W: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """KEY_HEADS heads of q or k (normalised, q scaled), or VALUE_HEADS of v, in TOKENS tokens of a chunk."""
    i_b = tl.program_id(0)
    PARTS: tl.constexpr = CHUNK // TOKENS
    C: tl.constexpr = 2 * HK * K + HV * V
    i_r, i_c, first, count = find_chunk(query_start_ptr, requests, tl.program_id(1) // PARTS, BLOCK_R, CHUNK)
    begin = i_c * CHUNK + tl.program_id(1) % PARTS * TOKENS
    if (i_r >= requests) | (begin >= count):
        return
    end = tl.minimum(count, begin + TOKENS)
    slot = tl.load(state_in_ptr + i_r).to(tl.int64)
    window_ptr = conv_pool_ptr + slot * conv_stride_slot
    x_ptr = mixed_ptr + first * mixed_stride_t
    y_ptr = columns_ptr + first * C
    if i_b < 2 * HK // KEY_HEADS:
        convolve_tokens(
            x_ptr,
            y_ptr,
            conv_weight_ptr,
            window_ptr,
            i_b * (KEY_HEADS * K) + tl.arange(0, KEY_HEADS * K),
            begin,
            end,
            slot > 0,
            tl.where(i_b < HK // KEY_HEADS, K**-0.5, 1.0),
            mixed_stride_t,
            weight_stride_c,
            weight_stride_w,
            conv_stride_c,
            conv_stride_w,
            C,
            K,
            W,
            True,
        )
    else:
        convolve_tokens(
            x_ptr,
            y_ptr,
            conv_weight_ptr,
            window_ptr,
            2 * HK * K + (i_b - 2 * HK // KEY_HEADS) * (VALUE_HEADS * V) + tl.arange(0, VALUE_HEADS * V),
            begin,
            end,
            slot > 0,
            1.0,
            mixed_stride_t,
            weight_stride_c,
            weight_stride_w,
            conv_stride_c,
            conv_stride_w,
            C,
            V,
            W,
            False,
        )


@triton.jit
def unit_lower_inverse(A, CHUNK: tl.constexpr, dtype: tl.constexpr):
    """(I + A)^-1 for A [CHUNK, CHUNK] strictly lower, by products of blocks that double from 2 to CHUNK.

    With X the inverse of the blocks on the diagonal, -X A X is that of what stands between two of them: no power of A larger
    than the inverse itself is ever formed, so 16-bit factors do if they have float16's precision.
    """
    apart = tl.arange(0, CHUNK)[:, None] ^ tl.arange(0, CHUNK)[None, :]
    X = tl.where(apart == 0, 1.0, tl.where(apart == 1, -A, 0.0))
    low = A.to(dtype)
    LEVELS: tl.constexpr = 5
    tl.static_assert(CHUNK == 2 << LEVELS)
    for level in tl.static_range(1, LEVELS + 1):
        known = X.to(dtype)
        between = tl.dot(known, low, input_precision="ieee")
        between = tl.dot(between.to(dtype), known, input_precision="ieee")
        X -= tl.where(apart >> level == 1, between, 0.0)
    return X


@kernel
def matrices_kernel(
    columns_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    query_start_ptr,
    inverse_ptr,
    scores_ptr,
    decays_ptr,
    requests,
    a_stride_t,
    b_stride_t,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
):
    """X, P and (G / ln 2, exp(G), exp(G's last - G), beta) of one value head in one chunk."""
    i_hv = tl.program_id(0)
    i_n = tl.program_id(1)
    C: tl.constexpr = 2 * HK * K + HV * V
    i_r, i_c, first, count = find_chunk(query_start_ptr, requests, i_n, BLOCK_R, CHUNK)
    if i_r >= requests:
        return
    o_i = tl.arange(0, CHUNK)
    o_p = i_c * CHUNK + o_i.to(tl.int64)
    real = o_p < count
    p_q = columns_ptr + (first + o_p)[:, None] * C + (i_hv // (HV // HK) * K + tl.arange(0, K))[None, :]
    q = tl.load(p_q, mask=real[:, None], other=0.0)
    k = tl.load(p_q + HK * K, mask=real[:, None], other=0.0)
    a = tl.load(a_ptr + (first + o_p) * a_stride_t + i_hv, mask=real, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + (first + o_p) * b_stride_t + i_hv, mask=real, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log_ptr + i_hv).to(tl.float32)) * LOG2_E
    bias = tl.load(dt_bias_ptr + i_hv).to(tl.float32)
    beta = tl.where(real, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    g = tl.where(real, -rate * softplus(a + bias), 0.0)
    G = tl.cumsum(g, 0)
    last = tl.sum(tl.where(o_i == CHUNK - 1, G, 0.0), 0)
    i_x = i_n.to(tl.int64) * HV + i_hv
    p_decays = decays_ptr + i_x * (4 * CHUNK) + o_i
    tl.store(p_decays, G)
    tl.store(p_decays + CHUNK, tl.exp2(G))
    tl.store(p_decays + 2 * CHUNK, tl.exp2(last - G))
    tl.store(p_decays + 3 * CHUNK, beta)
    o_x = i_x * (CHUNK * CHUNK) + o_i[:, None] * CHUNK + o_i[None, :]
    # Masked before exp2: differences in the other direction are positive and may overflow.
    between = tl.exp2(tl.where(o_i[:, None] >= o_i[None, :], G[:, None] - G[None, :], float("-inf")))
    P = between * tl.dot(q, tl.trans(k), input_precision="ieee")
    tl.store(scores_ptr + o_x, P.to(scores_ptr.dtype.element_ty))
    A = beta[:, None] * between * tl.dot(k, tl.trans(k), input_precision="ieee")
    A = tl.where(o_i[:, None] > o_i[None, :], A, 0.0)
    X = unit_lower_inverse(A, CHUNK, tl.float32 if EXACT else tl.float16) * beta[None, :]
    tl.store(inverse_ptr + o_x, X.to(inverse_ptr.dtype.element_ty))


@triton.jit
def store_windows(
    x_ptr,
    source_ptr,
    target_ptr,
    o_c,
    inside,
    has_window,
    after,
    mixed_stride_t,
    conv_stride_c,
    conv_stride_w,
    W: tl.constexpr,
):
    """The window after so many tokens. Source and target may be the same: columns go in order."""
    for j in tl.static_range(W - 1):
        i_x = after - (W - 1) + j
        if i_x >= 0:
            column = tl.load(x_ptr + i_x.to(tl.int64) * mixed_stride_t + o_c, mask=inside, other=0.0)
            tl.store(
                target_ptr + o_c * conv_stride_c + j * conv_stride_w,
                column.to(target_ptr.dtype.element_ty),
                mask=inside,
            )
        else:
            column = tl.load(
                source_ptr + o_c * conv_stride_c + (i_x + W - 1) * conv_stride_w, mask=inside & has_window, other=0.0
            )
            tl.store(target_ptr + o_c * conv_stride_c + j * conv_stride_w, column, mask=inside)


@kernel
def windows_kernel(
    mixed_ptr,
    conv_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    state_out_ptr,
    exports_ptr,
    exports_count,
    channels,
    mixed_stride_t,
    conv_stride_slot,
    conv_stride_c,
    conv_stride_w,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    i_r = tl.program_id(1)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = o_c < channels
    first = tl.load(query_start_ptr + i_r).to(tl.int64)
    count = (tl.load(query_start_ptr + i_r + 1).to(tl.int64) - first).to(tl.int32)
    source = tl.load(state_in_ptr + i_r).to(tl.int64)
    target = tl.load(state_out_ptr + i_r).to(tl.int64)
    x_ptr = mixed_ptr + first * mixed_stride_t
    source_ptr = conv_pool_ptr + source * conv_stride_slot
    found, i_e, after, slot = find_export(exports_ptr, exports_count, i_r, -1, BLOCK_E)
    while found:
        store_windows(
            x_ptr,
            source_ptr,
            conv_pool_ptr + slot * conv_stride_slot,
            o_c,
            inside,
            source > 0,
            tl.minimum(tl.maximum(after, 0), count),
            mixed_stride_t,
            conv_stride_c,
            conv_stride_w,
            W,
        )
        found, i_e, after, slot = find_export(exports_ptr, exports_count, i_r, i_e, BLOCK_E)
    if target > 0:
        copy_ptr = conv_pool_ptr + target * conv_stride_slot
        store_windows(
            x_ptr, source_ptr, copy_ptr, o_c, inside, source > 0, count, mixed_stride_t, conv_stride_c, conv_stride_w, W
        )


@kernel
def norm_kernel(
    out_ptr,
    z_ptr,
    norm_weight_ptr,
    y_ptr,
    data_ptr,
    scale_ptr,
    eps,
    rows,
    z_stride_t,
    scale_stride_t,
    scale_stride_k,
    HV: tl.constexpr,
    V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = gated norm of rows (token, value head) of out, which may be y; plain, packed or both."""
    o_v = tl.arange(0, V)
    weight = tl.load(norm_weight_ptr + o_v).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = (o_row < rows)[:, None]
    dtype = out_ptr.dtype.element_ty
    o = tl.load(out_ptr + o_row[:, None] * V + o_v[None, :], mask=inside, other=0.0).to(tl.float32)
    o_z = (o_row // HV) * z_stride_t + (o_row % HV) * V
    z = tl.load(z_ptr + o_z[:, None] + o_v[None, :], mask=inside, other=0.0).to(tl.float32)
    y = (o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None]).to(dtype).to(tl.float32)
    product = y * weight[None, :]
    if ROUND_PRODUCT:
        product = product.to(dtype).to(tl.float32)
    y = (product * silu(z)).to(dtype)
    if y_ptr is not None:
        tl.store(y_ptr + o_row[:, None] * V + o_v[None, :], y, mask=inside)
    if data_ptr is not None:
        first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
        store_packed(y, first, rows, 0, V, data_ptr, scale_ptr, scale_stride_t, scale_stride_k, HV, BLOCK_ROWS, V)


def gated_result(out: Tensor, emit: Emission | None) -> Weight:
    """What the gated norm of raw outputs out [T, HV V] is written to: `out` if it is wanted plain, and room for it packed."""
    if emit is None:
        return out
    packed = empty_packed(out.shape, emit.format, out.device)
    return replace(packed, plain=out) if emit.plain else packed


def gate_outputs(
    out: Tensor,
    z: Tensor,
    norm_weight: Tensor,
    eps: float,
    result: Weight,
    value_heads: int,
    block_rows: int,
    round_product: bool,
    **launch: bool,
) -> None:
    """The gated norm of raw outputs out [T, HV V] to `gated_result`. launch: PDL, and launch_pdl if that is on."""
    tokens, columns = out.shape
    norm_kernel[(cdiv(tokens * value_heads, block_rows),)](
        out,
        z,
        norm_weight,
        plain_part(result),
        eps=eps,
        rows=tokens * value_heads,
        z_stride_t=z.stride(0),
        HV=value_heads,
        V=columns // value_heads,
        BLOCK_ROWS=block_rows,
        ROUND_PRODUCT=round_product,
        num_warps=4,
        **packed_arguments(result),
        **launch,
    )
