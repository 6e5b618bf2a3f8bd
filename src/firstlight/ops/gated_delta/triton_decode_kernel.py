"""The kernels of `triton_decode`. Letters: T HK HV K V as in the op; W taps of the convolution, TAPS padded to a power of two."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def convolve(
    x_ptr,
    weight_ptr,
    window_ptr,
    o_c,
    has_window,
    weight_stride_c,
    weight_stride_w,
    conv_stride_c,
    conv_stride_w,
    W: tl.constexpr,
    TAPS: tl.constexpr,
):
    """silu of the convolution of channels o_c at the token x_ptr, in its dtype."""
    o_w = tl.arange(0, TAPS)[None, :]
    p_window = window_ptr + o_c[:, None] * conv_stride_c + o_w * conv_stride_w
    older = tl.load(p_window, mask=has_window & (o_w < W - 1) & (o_c[:, None] >= 0), other=0.0)
    p_weight = weight_ptr + o_c[:, None] * weight_stride_c + o_w * weight_stride_w
    weight = tl.load(p_weight, mask=(o_w < W) & (o_c[:, None] >= 0), other=0.0).to(tl.float32)
    x = tl.load(x_ptr + o_c)
    columns = tl.where(o_w == W - 1, x[:, None].to(tl.float32), older.to(tl.float32))
    return silu(tl.sum(columns * weight, 1)).to(x.dtype)


@triton.jit
def next_window(
    x_ptr, window_ptr, o_c, has_window, moves, conv_stride_c, conv_stride_w, W: tl.constexpr, TAPS: tl.constexpr
):
    """The window [C, TAPS] after the token, or the one before it unless `moves`."""
    o_w = tl.arange(0, TAPS)[None, :]
    o_old = o_w + moves.to(tl.int32)
    p_window = window_ptr + o_c[:, None] * conv_stride_c + o_old * conv_stride_w
    older = tl.load(p_window, mask=has_window & (o_old < W - 1) & (o_c[:, None] >= 0), other=0.0)
    x = tl.load(x_ptr + o_c)[:, None].to(older.dtype)
    return tl.where(moves & (o_w == W - 2), x, older)


@triton.jit
def store_window(pool_ptr, o_c, window, conv_stride_c, conv_stride_w, W: tl.constexpr, TAPS: tl.constexpr):
    o_w = tl.arange(0, TAPS)[None, :]
    p_window = pool_ptr + o_c[:, None] * conv_stride_c + o_w * conv_stride_w
    tl.store(p_window, window, mask=(o_w < W - 1) & (o_c[:, None] >= 0))


@triton.jit
def advance(tile, v, q, k, decay, beta, overlap, moves):
    """(rows of the state after the token, or as they are unless `moves`; what the query reads from them).

    S' = decay S + u k^T, so S' q = decay (S q) + u (k . q): key and query meet the state as it was read.
    """
    held = tl.sum(tile * k[None, :], 1)
    answer = tl.sum(tile * q[None, :], 1)
    update = beta * (v - decay * held)
    o = decay * answer + update * overlap
    fade = tl.where(moves, decay, 1.0)
    added = tl.where(moves, update, 0.0)[:, None] * tl.where(moves, k, 0.0)[None, :]
    return tile * fade + added, o


@triton.jit
def gated_delta_decode_kernel(
    mixed_ptr,
    z_ptr,
    a_ptr,
    b_ptr,
    conv_weight_ptr,
    A_log_ptr,
    dt_bias_ptr,
    norm_weight_ptr,
    conv_pool_ptr,
    state_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    state_out_ptr,
    exports_ptr,
    tickets_ptr,
    out_ptr,
    eps,
    exports_count,
    tokens,
    mixed_stride_t,
    z_stride_t,
    a_stride_t,
    b_stride_t,
    weight_stride_c,
    weight_stride_w,
    conv_stride_slot,
    conv_stride_c,
    conv_stride_w,
    state_stride_slot,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
):
    i_hv = tl.program_id(0)
    i_r = tl.program_id(1)
    GROUP: tl.constexpr = HV // HK
    i_hk = i_hv // GROUP
    source = tl.load(state_in_ptr + i_r).to(tl.int64)
    target = tl.load(state_out_ptr + i_r).to(tl.int64)
    first = tl.load(query_start_ptr + i_r).to(tl.int64)
    has_token = tl.load(query_start_ptr + i_r + 1).to(tl.int64) > first
    has_state = source > 0
    row = tl.minimum(first, tokens - 1)

    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    o_s = o_v[:, None] * K + o_k[None, :]
    held_ptr = state_pool_ptr + source * state_stride_slot + i_hv * (V * K)
    # The state is most of what is read: ask for it first.
    state = tl.load(held_ptr + o_s, mask=has_state & (o_s >= 0), other=0.0)

    x_ptr = mixed_ptr + row * mixed_stride_t
    window_ptr = conv_pool_ptr + source * conv_stride_slot
    c_q = i_hk * K + o_k
    c_k = HK * K + c_q
    c_v = 2 * HK * K + i_hv * V + o_v
    q = convolve(
        x_ptr,
        conv_weight_ptr,
        window_ptr,
        c_q,
        has_state,
        weight_stride_c,
        weight_stride_w,
        conv_stride_c,
        conv_stride_w,
        W,
        TAPS,
    )
    k = convolve(
        x_ptr,
        conv_weight_ptr,
        window_ptr,
        c_k,
        has_state,
        weight_stride_c,
        weight_stride_w,
        conv_stride_c,
        conv_stride_w,
        W,
        TAPS,
    )
    v = convolve(
        x_ptr,
        conv_weight_ptr,
        window_ptr,
        c_v,
        has_state,
        weight_stride_c,
        weight_stride_w,
        conv_stride_c,
        conv_stride_w,
        W,
        TAPS,
    )
    a = tl.load(a_ptr + row * a_stride_t + i_hv).to(tl.float32) + tl.load(dt_bias_ptr + i_hv).to(tl.float32)
    decay = tl.exp(-tl.exp(tl.load(A_log_ptr + i_hv).to(tl.float32)) * softplus(a))
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + row * b_stride_t + i_hv).to(tl.float32)))
    window_q = next_window(x_ptr, window_ptr, c_q, has_state, has_token, conv_stride_c, conv_stride_w, W, TAPS)
    window_k = next_window(x_ptr, window_ptr, c_k, has_state, has_token, conv_stride_c, conv_stride_w, W, TAPS)
    window_v = next_window(x_ptr, window_ptr, c_v, has_state, has_token, conv_stride_c, conv_stride_w, W, TAPS)
    z = tl.load(z_ptr + row * z_stride_t + i_hv * V + o_v).to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + o_v).to(tl.float32)

    dtype = q.dtype
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    q = (q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * K**-0.5)).to(dtype).to(tl.float32)
    k = (k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)).to(dtype).to(tl.float32)
    overlap = tl.sum(k * q, 0)

    # Every thread of this program has read its windows; the last program to say so writes the key head's part.
    tl.debug_barrier()
    last = (target > 0) | (exports_count > 0)
    if GROUP > 1:  # noqa: SIM102  (decided when compiling; the other one when running)
        if last:
            last = tl.atomic_add(tickets_ptr + i_r * HK + i_hk, 1, sem="acq_rel") == GROUP - 1

    for i_e in range(exports_count):
        slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
        after = tl.load(exports_ptr + 3 * i_e + 1)
        if (tl.load(exports_ptr + 3 * i_e) == i_r) & (slot > 0):
            moves = (after > 0) & has_token
            copy_ptr = conv_pool_ptr + slot * conv_stride_slot
            moved_v = next_window(x_ptr, window_ptr, c_v, has_state, moves, conv_stride_c, conv_stride_w, W, TAPS)
            store_window(copy_ptr, c_v, moved_v, conv_stride_c, conv_stride_w, W, TAPS)
            if last:
                moved_q = next_window(x_ptr, window_ptr, c_q, has_state, moves, conv_stride_c, conv_stride_w, W, TAPS)
                store_window(copy_ptr, c_q, moved_q, conv_stride_c, conv_stride_w, W, TAPS)
                moved_k = next_window(x_ptr, window_ptr, c_k, has_state, moves, conv_stride_c, conv_stride_w, W, TAPS)
                store_window(copy_ptr, c_k, moved_k, conv_stride_c, conv_stride_w, W, TAPS)
            if after <= 1:
                exported, _ = advance(state, v.to(tl.float32), q, k, decay, beta, overlap, moves)
                tl.store(state_pool_ptr + slot * state_stride_slot + i_hv * (V * K) + o_s, exported)

    state, o = advance(state, v.to(tl.float32), q, k, decay, beta, overlap, has_token)
    tl.store(state_pool_ptr + target * state_stride_slot + i_hv * (V * K) + o_s, state, mask=(target > 0) & (o_s >= 0))
    if has_token:
        o = o.to(dtype).to(tl.float32)
        y = (o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)).to(dtype).to(tl.float32)
        product = y * norm_weight
        if ROUND_PRODUCT:
            product = product.to(dtype).to(tl.float32)
        tl.store(out_ptr + row * (HV * V) + i_hv * V + o_v, (product * silu(z)).to(dtype))
    if target > 0:
        copy_ptr = conv_pool_ptr + target * conv_stride_slot
        store_window(copy_ptr, c_v, window_v, conv_stride_c, conv_stride_w, W, TAPS)
        if last:
            store_window(copy_ptr, c_q, window_q, conv_stride_c, conv_stride_w, W, TAPS)
            store_window(copy_ptr, c_k, window_k, conv_stride_c, conv_stride_w, W, TAPS)
    if GROUP > 1:  # noqa: SIM102  (decided when compiling; the other one when running)
        if last:
            tl.store(tickets_ptr + i_r * HK + i_hk, 0)


@triton.jit
def prepare_kernel(
    mixed_ptr,
    a_ptr,
    b_ptr,
    conv_weight_ptr,
    A_log_ptr,
    dt_bias_ptr,
    conv_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    state_out_ptr,
    exports_ptr,
    columns_ptr,
    gates_ptr,
    exports_count,
    tokens,
    mixed_stride_t,
    a_stride_t,
    b_stride_t,
    weight_stride_c,
    weight_stride_w,
    conv_stride_slot,
    conv_stride_c,
    conv_stride_w,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
):
    """One head of q, k (normalised, q scaled) or v of one request, with its part of the window, and a value head's gates."""
    i_h = tl.program_id(0)
    i_r = tl.program_id(1).to(tl.int64)
    source = tl.load(state_in_ptr + i_r).to(tl.int64)
    target = tl.load(state_out_ptr + i_r).to(tl.int64)
    first = tl.load(query_start_ptr + i_r).to(tl.int64)
    has_token = tl.load(query_start_ptr + i_r + 1).to(tl.int64) > first
    row = tl.minimum(first, tokens - 1)
    x_ptr = mixed_ptr + row * mixed_stride_t
    y_ptr = columns_ptr + i_r * (2 * HK * K + HV * V)
    window_ptr = conv_pool_ptr + source * conv_stride_slot
    if i_h < 2 * HK:
        c_k = i_h * K + tl.arange(0, K)
        k = convolve(
            x_ptr,
            conv_weight_ptr,
            window_ptr,
            c_k,
            source > 0,
            weight_stride_c,
            weight_stride_w,
            conv_stride_c,
            conv_stride_w,
            W,
            TAPS,
        )
        wide = k.to(tl.float32)
        scale = tl.where(i_h < HK, K**-0.5, 1.0)
        tl.store(y_ptr + c_k, (wide * (tl.rsqrt(tl.sum(wide * wide, 0) + 1e-6) * scale)).to(k.dtype))
        write_windows(
            x_ptr,
            conv_pool_ptr,
            source,
            target,
            exports_ptr,
            exports_count,
            i_r,
            c_k,
            has_token,
            conv_stride_slot,
            conv_stride_c,
            conv_stride_w,
            W,
            TAPS,
        )
    else:
        i_hv = i_h - 2 * HK
        c_v = 2 * HK * K + i_hv * V + tl.arange(0, V)
        v = convolve(
            x_ptr,
            conv_weight_ptr,
            window_ptr,
            c_v,
            source > 0,
            weight_stride_c,
            weight_stride_w,
            conv_stride_c,
            conv_stride_w,
            W,
            TAPS,
        )
        tl.store(y_ptr + c_v, v)
        a = tl.load(a_ptr + row * a_stride_t + i_hv).to(tl.float32) + tl.load(dt_bias_ptr + i_hv).to(tl.float32)
        b = tl.load(b_ptr + row * b_stride_t + i_hv).to(tl.float32)
        decay = tl.exp(-tl.exp(tl.load(A_log_ptr + i_hv).to(tl.float32)) * softplus(a))
        tl.store(gates_ptr + (i_r * HV + i_hv) * 2, decay)
        tl.store(gates_ptr + (i_r * HV + i_hv) * 2 + 1, 1.0 / (1.0 + tl.exp(-b)))
        write_windows(
            x_ptr,
            conv_pool_ptr,
            source,
            target,
            exports_ptr,
            exports_count,
            i_r,
            c_v,
            has_token,
            conv_stride_slot,
            conv_stride_c,
            conv_stride_w,
            W,
            TAPS,
        )


@triton.jit
def write_windows(
    x_ptr,
    pool_ptr,
    source,
    target,
    exports_ptr,
    exports_count,
    i_r,
    o_c,
    has_token,
    conv_stride_slot,
    conv_stride_c,
    conv_stride_w,
    W: tl.constexpr,
    TAPS: tl.constexpr,
):
    """The windows of channels that this program alone reads and writes: those exported, then the one after the step."""
    window_ptr = pool_ptr + source * conv_stride_slot
    for i_e in range(exports_count):
        slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
        if (tl.load(exports_ptr + 3 * i_e) == i_r) & (slot > 0):
            moves = (tl.load(exports_ptr + 3 * i_e + 1) > 0) & has_token
            window = next_window(x_ptr, window_ptr, o_c, source > 0, moves, conv_stride_c, conv_stride_w, W, TAPS)
            store_window(pool_ptr + slot * conv_stride_slot, o_c, window, conv_stride_c, conv_stride_w, W, TAPS)
    window = next_window(x_ptr, window_ptr, o_c, source > 0, has_token, conv_stride_c, conv_stride_w, W, TAPS)
    tl.debug_barrier()
    if target > 0:
        store_window(pool_ptr + target * conv_stride_slot, o_c, window, conv_stride_c, conv_stride_w, W, TAPS)


@triton.jit
def recurrence_kernel(
    columns_ptr,
    gates_ptr,
    z_ptr,
    norm_weight_ptr,
    state_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    state_out_ptr,
    exports_ptr,
    out_ptr,
    eps,
    exports_count,
    z_stride_t,
    state_stride_slot,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
):
    """The recurrence and the gated norm of one value head, its state going by in tiles that are fetched ahead.

    o waits in its place in the output until the norm has seen all of it: it is rounded to that dtype anyway.
    """
    i_hv = tl.program_id(0)
    i_r = tl.program_id(1).to(tl.int64)
    source = tl.load(state_in_ptr + i_r).to(tl.int64)
    target = tl.load(state_out_ptr + i_r).to(tl.int64)
    row = tl.load(query_start_ptr + i_r).to(tl.int64)
    has_token = tl.load(query_start_ptr + i_r + 1).to(tl.int64) > row
    dtype = out_ptr.dtype.element_ty
    o_k = tl.arange(0, K)
    o_b = tl.arange(0, BLOCK_V)
    o_s = o_b[:, None] * K + o_k[None, :]
    y_ptr = columns_ptr + i_r * (2 * HK * K + HV * V)
    q = tl.load(y_ptr + i_hv // (HV // HK) * K + o_k).to(tl.float32)
    k = tl.load(y_ptr + HK * K + i_hv // (HV // HK) * K + o_k).to(tl.float32)
    v_ptr = y_ptr + 2 * HK * K + i_hv * V
    decay = tl.load(gates_ptr + (i_r * HV + i_hv) * 2)
    beta = tl.load(gates_ptr + (i_r * HV + i_hv) * 2 + 1)
    overlap = tl.sum(k * q, 0)
    source_ptr = state_pool_ptr + source * state_stride_slot + i_hv * (V * K)
    held = (source > 0) & (o_s >= 0)
    for i_e in range(exports_count):
        slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
        after = tl.load(exports_ptr + 3 * i_e + 1)
        if (tl.load(exports_ptr + 3 * i_e) == i_r) & (slot > 0) & (after <= 1):
            target_ptr = state_pool_ptr + slot * state_stride_slot + i_hv * (V * K)
            for i_v in range(0, V, BLOCK_V):
                tile = tl.load(source_ptr + i_v * K + o_s, mask=held, other=0.0)
                v = tl.load(v_ptr + i_v + o_b).to(tl.float32)
                tile, _ = advance(tile, v, q, k, decay, beta, overlap, (after > 0) & has_token)
                tl.store(target_ptr + i_v * K + o_s, tile)
    target_ptr = state_pool_ptr + target * state_stride_slot + i_hv * (V * K)
    row_ptr = out_ptr + row * (HV * V) + i_hv * V
    for i_v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        tile = tl.load(source_ptr + i_v * K + o_s, mask=held, other=0.0)
        v = tl.load(v_ptr + i_v + o_b).to(tl.float32)
        tile, o = advance(tile, v, q, k, decay, beta, overlap, has_token)
        tl.store(target_ptr + i_v * K + o_s, tile, mask=(target > 0) & (o_s >= 0))
        tl.store(row_ptr + i_v + o_b, o.to(dtype), mask=has_token & (o_b >= 0))
    tl.debug_barrier()
    if has_token:
        o_v = tl.arange(0, V)
        z = tl.load(z_ptr + row * z_stride_t + i_hv * V + o_v).to(tl.float32)
        o = tl.load(row_ptr + o_v).to(tl.float32)
        y = (o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)).to(dtype).to(tl.float32)
        product = y * tl.load(norm_weight_ptr + o_v).to(tl.float32)
        if ROUND_PRODUCT:
            product = product.to(dtype).to(tl.float32)
        tl.store(row_ptr + o_v, (product * silu(z)).to(dtype))
