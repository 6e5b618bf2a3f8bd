"""The kernel of `triton_decode`. Letters: B T H HK HV K V as in the op; W taps of the convolution.

A state goes by in tiles [BLOCK_V, K], fetched ahead of their use, or at once (WHOLE), which is quicker as long as there are
fewer programs than multiprocessors. v and o wait in registers as [V / BLOCK_V, BLOCK_V], a row for each tile.
"""

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
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    WHOLE: tl.constexpr,
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
    o_n = tl.arange(0, V // BLOCK_V)[:, None]
    o_s = tl.arange(0, BLOCK_V)[:, None] * K + o_k[None, :]
    held_ptr = state_pool_ptr + source * state_stride_slot + i_hv * (V * K)
    tile = tl.zeros([BLOCK_V, K], tl.float32)
    if WHOLE:
        # The state is most of what is read: ask for it first.
        tile = tl.load(held_ptr + o_s, mask=has_state & (o_s >= 0), other=0.0)

    x_ptr = mixed_ptr + row * mixed_stride_t
    window_ptr = conv_pool_ptr + source * conv_stride_slot
    c_q = i_hk * K + o_k
    c_k = HK * K + c_q
    c_v = 2 * HK * K + i_hv * V + o_v
    q = convolve(x_ptr, conv_weight_ptr, window_ptr, c_q, has_state, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W, TAPS)
    k = convolve(x_ptr, conv_weight_ptr, window_ptr, c_k, has_state, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W, TAPS)
    v = convolve(x_ptr, conv_weight_ptr, window_ptr, c_v, has_state, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W, TAPS)
    a = tl.load(a_ptr + row * a_stride_t + i_hv).to(tl.float32) + tl.load(dt_bias_ptr + i_hv).to(tl.float32)
    decay = tl.exp(-tl.exp(tl.load(A_log_ptr + i_hv).to(tl.float32)) * softplus(a))
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + row * b_stride_t + i_hv).to(tl.float32)))
    if WHOLE:
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
    values = tl.reshape(v.to(tl.float32), [V // BLOCK_V, BLOCK_V])

    # Every thread of this program has read its windows; the last program to say so writes the key head's part.
    tl.debug_barrier()
    last = (target > 0) | (exports_count > 0)
    if GROUP > 1:
        if last:
            last = tl.atomic_add(tickets_ptr + i_r * HK + i_hk, 1, sem="acq_rel") == GROUP - 1

    for i_e in range(exports_count):
        slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
        after = tl.load(exports_ptr + 3 * i_e + 1)
        if (tl.load(exports_ptr + 3 * i_e) == i_r) & (slot > 0):
            moves = (after > 0) & has_token
            copy_ptr = conv_pool_ptr + slot * conv_stride_slot
            window = next_window(x_ptr, window_ptr, c_v, has_state, moves, conv_stride_c, conv_stride_w, W, TAPS)
            store_window(copy_ptr, c_v, window, conv_stride_c, conv_stride_w, W, TAPS)
            if last:
                window = next_window(x_ptr, window_ptr, c_q, has_state, moves, conv_stride_c, conv_stride_w, W, TAPS)
                store_window(copy_ptr, c_q, window, conv_stride_c, conv_stride_w, W, TAPS)
                window = next_window(x_ptr, window_ptr, c_k, has_state, moves, conv_stride_c, conv_stride_w, W, TAPS)
                store_window(copy_ptr, c_k, window, conv_stride_c, conv_stride_w, W, TAPS)
            if after <= 1:
                written_ptr = state_pool_ptr + slot * state_stride_slot + i_hv * (V * K)
                for i_n in range(0, V // BLOCK_V):
                    exported = tl.load(held_ptr + i_n * (BLOCK_V * K) + o_s, mask=has_state & (o_s >= 0), other=0.0)
                    v_n = tl.sum(tl.where(o_n == i_n, values, 0.0), 0)
                    exported, _ = advance(exported, v_n, q, k, decay, beta, overlap, moves)
                    tl.store(written_ptr + i_n * (BLOCK_V * K) + o_s, exported)

    written_ptr = state_pool_ptr + target * state_stride_slot + i_hv * (V * K)
    answers = tl.zeros([V // BLOCK_V, BLOCK_V], tl.float32)
    for i_n in tl.range(0, V // BLOCK_V, num_stages=STAGES):
        if not WHOLE:
            tile = tl.load(held_ptr + i_n * (BLOCK_V * K) + o_s, mask=has_state & (o_s >= 0), other=0.0)
        v_n = tl.sum(tl.where(o_n == i_n, values, 0.0), 0)
        written, o_n_values = advance(tile, v_n, q, k, decay, beta, overlap, has_token)
        tl.store(written_ptr + i_n * (BLOCK_V * K) + o_s, written, mask=(target > 0) & (o_s >= 0))
        answers = tl.where(o_n == i_n, o_n_values[None, :], answers)

    if has_token:
        o = tl.reshape(answers, [V]).to(dtype).to(tl.float32)
        y = (o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)).to(dtype).to(tl.float32)
        product = y * norm_weight
        if ROUND_PRODUCT:
            product = product.to(dtype).to(tl.float32)
        tl.store(out_ptr + row * (HV * V) + i_hv * V + o_v, (product * silu(z)).to(dtype))
    if not WHOLE:
        window_q = next_window(x_ptr, window_ptr, c_q, has_state, has_token, conv_stride_c, conv_stride_w, W, TAPS)
        window_k = next_window(x_ptr, window_ptr, c_k, has_state, has_token, conv_stride_c, conv_stride_w, W, TAPS)
        window_v = next_window(x_ptr, window_ptr, c_v, has_state, has_token, conv_stride_c, conv_stride_w, W, TAPS)
        tl.debug_barrier()
    if target > 0:
        copy_ptr = conv_pool_ptr + target * conv_stride_slot
        store_window(copy_ptr, c_v, window_v, conv_stride_c, conv_stride_w, W, TAPS)
        if last:
            store_window(copy_ptr, c_q, window_q, conv_stride_c, conv_stride_w, W, TAPS)
            store_window(copy_ptr, c_k, window_k, conv_stride_c, conv_stride_w, W, TAPS)
    if GROUP > 1:
        if last:
            tl.store(tickets_ptr + i_r * HK + i_hk, 0)
