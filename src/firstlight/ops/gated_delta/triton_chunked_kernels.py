"""The kernels of `triton_chunked`. Letters: T tokens, HK and HV heads, K and V their sizes, W taps of the convolution."""

from __future__ import annotations

import triton
import triton.language as tl

from firstlight.ops.gated_delta.triton_decode_kernel import silu, softplus


@triton.jit
def chunks_before(query_start_ptr, requests, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr):
    """(request, chunks of it and of those before it) for all requests."""
    o_r = tl.arange(0, BLOCK_R)
    inside = o_r < requests
    begin = tl.load(query_start_ptr + o_r, mask=inside, other=0).to(tl.int32)
    end = tl.load(query_start_ptr + o_r + 1, mask=inside, other=0).to(tl.int32)
    return o_r, tl.cumsum((end - begin + CHUNK - 1) // CHUNK, 0)


@triton.jit
def unit_lower_inverse(A, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for A [64, 64] strictly lower: blocks of 16 by elimination, then pairs of blocks, then pairs of those."""
    SMALL: tl.constexpr = 16
    PARTS: tl.constexpr = CHUNK // SMALL
    part = tl.arange(0, PARTS)
    small = tl.arange(0, SMALL)
    same = part[:, None, None, None] == part[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(A, [PARTS, SMALL, PARTS, SMALL]), 0.0), 2)
    X = tl.where(small[None, :, None] == small[None, None, :], 1.0, 0.0) + tl.zeros([PARTS, SMALL, SMALL], tl.float32)
    for j in range(SMALL - 1):
        column = tl.sum(tl.where(small[None, None, :] == j, diagonal, 0.0), 2)
        done = tl.sum(tl.where(small[None, :, None] == j, X, 0.0), 1)
        X -= column[:, :, None] * done[:, None, :]
    D = tl.reshape(tl.where(same, X[:, :, None, :], 0.0), [CHUNK, CHUNK])
    o_i = tl.arange(0, CHUNK)[:, None]
    o_j = tl.arange(0, CHUNK)[None, :]
    pair = tl.where((o_i // 16 != o_j // 16) & (o_i // 32 == o_j // 32), A, 0.0)
    D -= tl.dot(D, tl.dot(pair, D, input_precision=PRECISION), input_precision=PRECISION)
    half = tl.where(o_i // 32 != o_j // 32, A, 0.0)
    D -= tl.dot(D, tl.dot(half, D, input_precision=PRECISION), input_precision=PRECISION)
    return D


@triton.jit
def convolve_rows(
    x_ptr,
    weight_ptr,
    window_ptr,
    o_c,
    begin,
    count,
    has_window,
    x_stride_t,
    weight_stride_c,
    weight_stride_w,
    conv_stride_c,
    conv_stride_w,
    W: tl.constexpr,
    ROWS: tl.constexpr,
):
    """silu of the convolution at ROWS of a request's tokens from `begin`, channels o_c; zeros past its end.

    x_ptr: the token at `begin`.
    """
    o_i = tl.arange(0, ROWS)
    real = begin + o_i < count
    total = tl.zeros([ROWS, o_c.shape[0]], tl.float32)
    for j in tl.static_range(W):
        inside = real & (begin + o_i + (j - W + 1) >= 0)
        x = tl.load(x_ptr + (o_i + (j - W + 1))[:, None] * x_stride_t + o_c[None, :], mask=inside[:, None], other=0.0)
        total += (
            x.to(tl.float32) * tl.load(weight_ptr + o_c * weight_stride_c + j * weight_stride_w).to(tl.float32)[None, :]
        )
    if begin < W - 1:
        for j in tl.static_range(W - 1):
            o_w = begin + o_i + j  # column of the window, as long as it is one
            before = real & (o_w < W - 1) & has_window
            x = tl.load(
                window_ptr + o_w[:, None] * conv_stride_w + o_c[None, :] * conv_stride_c,
                mask=before[:, None],
                other=0.0,
            )
            total += (
                x.to(tl.float32)
                * tl.load(weight_ptr + o_c * weight_stride_c + j * weight_stride_w).to(tl.float32)[None, :]
            )
    return silu(total).to(x_ptr.dtype.element_ty)


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
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """q, k (normalised, q scaled) or v of one head in ROWS tokens of a chunk."""
    i_h = tl.program_id(0)
    PARTS: tl.constexpr = CHUNK // ROWS
    C: tl.constexpr = 2 * HK * K + HV * V
    i_r, i_c, first, count = find_chunk(query_start_ptr, requests, tl.program_id(1) // PARTS, BLOCK_R, CHUNK)
    begin = i_c * CHUNK + tl.program_id(1) % PARTS * ROWS
    if (i_r >= requests) | (begin >= count):
        return
    slot = tl.load(state_in_ptr + i_r).to(tl.int64)
    window_ptr = conv_pool_ptr + slot * conv_stride_slot
    x_ptr = mixed_ptr + (first + begin) * mixed_stride_t
    y_ptr = columns_ptr + (first + begin) * C
    o_i = tl.arange(0, ROWS)[:, None]
    if i_h < 2 * HK:
        c_k = i_h * K + tl.arange(0, K)
        k = convolve_rows(
            x_ptr,
            conv_weight_ptr,
            window_ptr,
            c_k,
            begin,
            count,
            slot > 0,
            mixed_stride_t,
            weight_stride_c,
            weight_stride_w,
            conv_stride_c,
            conv_stride_w,
            W,
            ROWS,
        )
        wide = k.to(tl.float32)
        scale = tl.where(i_h < HK, K**-0.5, 1.0)
        k = (wide * (tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * scale)[:, None]).to(k.dtype)
        tl.store(y_ptr + o_i * C + c_k[None, :], k, mask=begin + o_i < count)
    else:
        c_v = 2 * HK * K + (i_h - 2 * HK) * V + tl.arange(0, V)
        v = convolve_rows(
            x_ptr,
            conv_weight_ptr,
            window_ptr,
            c_v,
            begin,
            count,
            slot > 0,
            mixed_stride_t,
            weight_stride_c,
            weight_stride_w,
            conv_stride_c,
            conv_stride_w,
            W,
            ROWS,
        )
        tl.store(y_ptr + o_i * C + c_v[None, :], v, mask=begin + o_i < count)


@triton.jit
def matrices_kernel(
    columns_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    query_start_ptr,
    inverse_ptr,
    scores_ptr,
    total_ptr,
    requests,
    a_stride_t,
    b_stride_t,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """X, P and G of one value head in one chunk."""
    i_hv = tl.program_id(0)
    i_n = tl.program_id(1)
    C: tl.constexpr = 2 * HK * K + HV * V
    i_hk = i_hv // (HV // HK)
    i_r, i_c, first, count = find_chunk(query_start_ptr, requests, i_n, BLOCK_R, CHUNK)
    if i_r >= requests:
        return
    o_i = tl.arange(0, CHUNK)
    o_p = i_c * CHUNK + o_i.to(tl.int64)
    real = o_p < count
    a = tl.load(a_ptr + (first + o_p) * a_stride_t + i_hv, mask=real, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + (first + o_p) * b_stride_t + i_hv, mask=real, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log_ptr + i_hv).to(tl.float32))
    bias = tl.load(dt_bias_ptr + i_hv).to(tl.float32)
    beta = tl.where(real, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    G = tl.cumsum(tl.where(real, -rate * softplus(a + bias), 0.0), 0)
    o_x = (i_n.to(tl.int64) * HV + i_hv) * (CHUNK * CHUNK) + o_i[:, None] * CHUNK + o_i[None, :]
    tl.store(total_ptr + (i_n.to(tl.int64) * HV + i_hv) * CHUNK + o_i, G)

    c_q = i_hk * K + tl.arange(0, K)
    y_ptr = columns_ptr + (first + o_p)[:, None] * C
    q = tl.load(y_ptr + c_q[None, :], mask=real[:, None], other=0.0)
    k = tl.load(y_ptr + HK * K + c_q[None, :], mask=real[:, None], other=0.0)
    # Masked before exp: differences in the other direction are positive and may overflow.
    between = tl.exp(tl.where(o_i[:, None] >= o_i[None, :], G[:, None] - G[None, :], float("-inf")))
    P = between * tl.dot(q, tl.trans(k), input_precision="ieee")
    tl.store(scores_ptr + o_x, P.to(scores_ptr.dtype.element_ty))
    A = beta[:, None] * between * tl.dot(k, tl.trans(k), input_precision="ieee")
    X = unit_lower_inverse(tl.where(o_i[:, None] > o_i[None, :], A, 0.0), CHUNK, PRECISION) * beta[None, :]
    tl.store(inverse_ptr + o_x, X.to(inverse_ptr.dtype.element_ty))


@triton.jit
def load_chunk(
    y_ptr,
    inverse_ptr,
    total_ptr,
    i_n,
    i_c,
    count,
    c_k,
    c_v,
    C: tl.constexpr,
    HV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """k [64, K], v [64, BLOCK_V], X [64, 64], G [64] of a chunk; zeros past the request's end."""
    o_i = tl.arange(0, CHUNK).to(tl.int64)
    o_p = i_c * CHUNK + o_i
    real = (o_p < count)[:, None]
    k = tl.load(y_ptr + o_p[:, None] * C + c_k[None, :], mask=real, other=0.0)
    v = tl.load(y_ptr + o_p[:, None] * C + c_v[None, :], mask=real, other=0.0)
    X = tl.load(inverse_ptr + (i_n + i_c) * (HV * CHUNK * CHUNK) + o_i[:, None] * CHUNK + o_i[None, :])
    G = tl.load(total_ptr + (i_n + i_c) * (HV * CHUNK) + o_i)
    return k, v, X, G


@triton.jit
def chunk_updates(S, k, v, X, G):
    """u [64, BLOCK_V] of a chunk, S [K, BLOCK_V] being the state before it."""
    known = tl.dot(k, S.to(k.dtype), input_precision="ieee") * tl.exp(G)[:, None]
    return tl.dot(X, (v.to(tl.float32) - known).to(k.dtype), input_precision="ieee")


@triton.jit
def states_kernel(
    columns_ptr,
    inverse_ptr,
    scores_ptr,
    total_ptr,
    state_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    state_out_ptr,
    exports_ptr,
    out_ptr,
    exports_count,
    requests,
    state_stride_slot,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_EXPORTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    SLICES: tl.constexpr = V // BLOCK_V
    C: tl.constexpr = 2 * HK * K + HV * V
    i_hv = tl.program_id(0) // SLICES
    i_v = tl.program_id(0) % SLICES
    i_r = tl.program_id(1)
    i_hk = i_hv // (HV // HK)
    o_r, ends = chunks_before(query_start_ptr, requests, BLOCK_R, CHUNK)
    i_n = tl.max(tl.where(o_r < i_r, ends, 0), 0).to(tl.int64)
    first = tl.load(query_start_ptr + i_r).to(tl.int64)
    count = (tl.load(query_start_ptr + i_r + 1).to(tl.int64) - first).to(tl.int32)
    source = tl.load(state_in_ptr + i_r).to(tl.int64)
    target = tl.load(state_out_ptr + i_r).to(tl.int64)

    o_i = tl.arange(0, CHUNK).to(tl.int64)
    o_k = tl.arange(0, K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    c_q = i_hk * K + o_k
    c_k = HK * K + c_q
    c_v = 2 * HK * K + i_hv * V + o_v
    y_ptr = columns_ptr + first * C
    x_ptr = inverse_ptr + i_hv * (CHUNK * CHUNK)
    p_ptr = scores_ptr + i_hv * (CHUNK * CHUNK)
    g_ptr = total_ptr + i_hv * CHUNK
    o_s = i_hv * (V * K) + o_v[None, :] * K + o_k[:, None]
    S = tl.load(state_pool_ptr + source * state_stride_slot + o_s, mask=(source > 0) & (o_s >= 0), other=0.0)

    chunks = (count + CHUNK - 1) // CHUNK
    done = 0
    while done <= chunks:
        stop = chunks
        if HAS_EXPORTS:
            for i_e in range(exports_count):
                after = tl.maximum(tl.load(exports_ptr + 3 * i_e + 1).to(tl.int32), 0)
                slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
                if (tl.load(exports_ptr + 3 * i_e) == i_r) & (slot > 0) & (after <= count) & (after // CHUNK == done):
                    tl.store(state_pool_ptr + slot * state_stride_slot + o_s, S)
            o_e = tl.arange(0, BLOCK_E)
            m_e = o_e < exports_count
            after = tl.maximum(tl.load(exports_ptr + 3 * o_e + 1, mask=m_e, other=0).to(tl.int32), 0)
            mine = (tl.load(exports_ptr + 3 * o_e, mask=m_e, other=-1) == i_r) & (after // CHUNK > done) & m_e
            mine = mine & (tl.load(exports_ptr + 3 * o_e + 2, mask=m_e, other=0) > 0)
            stop = tl.minimum(chunks, tl.min(tl.where(mine, after // CHUNK, chunks), 0))
        for i_c in tl.range(done, stop, num_stages=STAGES):
            k, v, X, G = load_chunk(y_ptr, x_ptr, g_ptr, i_n, i_c, count, c_k, c_v, C, HV, CHUNK)
            o_p = i_c * CHUNK + o_i
            real = (o_p < count)[:, None]
            q = tl.load(y_ptr + o_p[:, None] * C + c_q[None, :], mask=real, other=0.0)
            P = tl.load(p_ptr + (i_n + i_c) * (HV * CHUNK * CHUNK) + o_i[:, None] * CHUNK + o_i[None, :])
            last = tl.min(G, 0)  # decays are at most 1, so G falls
            asked = tl.dot(q, S.to(q.dtype), input_precision="ieee") * tl.exp(G)[:, None]
            u = chunk_updates(S, k, v, X, G)
            o = tl.dot(P, u.to(P.dtype), asked, input_precision="ieee")
            faded = (u * tl.exp(last - G)[:, None]).to(k.dtype)
            S = tl.dot(tl.trans(k), faded, S * tl.exp(last), input_precision="ieee")
            tl.store(
                out_ptr + (first + o_p)[:, None] * (HV * V) + (i_hv * V + o_v)[None, :],
                o.to(out_ptr.dtype.element_ty),
                mask=real,
            )
        done = tl.where(stop > done, stop, chunks + 1)
    if target > 0:
        tl.store(state_pool_ptr + target * state_stride_slot + o_s, S)


@triton.jit
def exports_kernel(
    columns_ptr,
    inverse_ptr,
    total_ptr,
    state_pool_ptr,
    query_start_ptr,
    exports_ptr,
    requests,
    state_stride_slot,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Takes exported states from the start of the chunk, where `states_kernel` left them, to a token inside it."""
    SLICES: tl.constexpr = V // BLOCK_V
    C: tl.constexpr = 2 * HK * K + HV * V
    i_hv = tl.program_id(0) // SLICES
    i_v = tl.program_id(0) % SLICES
    i_e = tl.program_id(1)
    i_r = tl.load(exports_ptr + 3 * i_e).to(tl.int32)
    after = tl.load(exports_ptr + 3 * i_e + 1).to(tl.int32)
    slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
    known = (slot > 0) & (i_r >= 0) & (i_r < requests)
    first = tl.load(query_start_ptr + i_r, mask=known, other=0).to(tl.int64)
    end = tl.load(query_start_ptr + i_r + 1, mask=known, other=0).to(tl.int64)
    count = (end - first).to(tl.int32)
    part = after % CHUNK
    if (slot <= 0) | (after <= 0) | (after > count) | (part == 0):
        return
    o_r, ends = chunks_before(query_start_ptr, requests, BLOCK_R, CHUNK)
    i_n = tl.max(tl.where(o_r < i_r, ends, 0), 0).to(tl.int64)
    o_i = tl.arange(0, CHUNK)
    o_k = tl.arange(0, K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_s = i_hv * (V * K) + o_v[None, :] * K + o_k[:, None]
    S = tl.load(state_pool_ptr + slot * state_stride_slot + o_s)
    k, v, X, G = load_chunk(
        columns_ptr + first * C,
        inverse_ptr + i_hv * (CHUNK * CHUNK),
        total_ptr + i_hv * CHUNK,
        i_n,
        after // CHUNK,
        count,
        HK * K + i_hv // (HV // HK) * K + o_k,
        2 * HK * K + i_hv * V + o_v,
        C,
        HV,
        CHUNK,
    )
    # In float32, so on no matrix unit: Triton 3.6 gives wrong products of a transposed bf16 tile here on sm_90, seen with 42
    # and 63 tokens into a chunk, where float32 is right.
    k, X = k.to(tl.float32), X.to(tl.float32)
    u = chunk_updates(S, k, v, X, G)
    reached = tl.sum(tl.where(o_i == part - 1, G, 0.0), 0)
    weight = tl.exp(tl.where(o_i < part, reached - G, float("-inf")))
    added = tl.dot(tl.trans(k), u * weight[:, None], input_precision="ieee")
    tl.store(state_pool_ptr + slot * state_stride_slot + o_s, S * tl.exp(reached) + added)


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


@triton.jit
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
    for i_e in range(exports_count):
        slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
        if (tl.load(exports_ptr + 3 * i_e) == i_r) & (slot > 0):
            after = tl.minimum(tl.maximum(tl.load(exports_ptr + 3 * i_e + 1).to(tl.int32), 0), count)
            copy_ptr = conv_pool_ptr + slot * conv_stride_slot
            store_windows(
                x_ptr,
                source_ptr,
                copy_ptr,
                o_c,
                inside,
                source > 0,
                after,
                mixed_stride_t,
                conv_stride_c,
                conv_stride_w,
                W,
            )
    if target > 0:
        copy_ptr = conv_pool_ptr + target * conv_stride_slot
        store_windows(
            x_ptr, source_ptr, copy_ptr, o_c, inside, source > 0, count, mixed_stride_t, conv_stride_c, conv_stride_w, W
        )


@triton.jit
def norm_kernel(
    out_ptr,
    z_ptr,
    norm_weight_ptr,
    eps,
    rows,
    z_stride_t,
    HV: tl.constexpr,
    V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
):
    """Gated norm of rows (token, value head), in place."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_v = tl.arange(0, V)
    inside = (o_row < rows)[:, None]
    dtype = out_ptr.dtype.element_ty
    o = tl.load(out_ptr + o_row[:, None] * V + o_v[None, :], mask=inside, other=0.0).to(tl.float32)
    o_z = (o_row // HV) * z_stride_t + (o_row % HV) * V
    z = tl.load(z_ptr + o_z[:, None] + o_v[None, :], mask=inside, other=0.0).to(tl.float32)
    y = (o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None]).to(dtype).to(tl.float32)
    product = y * tl.load(norm_weight_ptr + o_v).to(tl.float32)[None, :]
    if ROUND_PRODUCT:
        product = product.to(dtype).to(tl.float32)
    tl.store(out_ptr + o_row[:, None] * V + o_v[None, :], (product * silu(z)).to(dtype), mask=inside)
