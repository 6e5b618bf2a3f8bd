"""The kernel of `triton_decode`. Letters: B T H HK HV K V as in the op; W taps of the convolution.

A state goes by in tiles [BLOCK_V, K], fetched ahead of their use, or at once (WHOLE), which is quicker as long as there are
fewer programs than multiprocessors. The request's row of the output holds v until o takes its place, tile by tile, and o
until the norm has seen all of it: both are rounded to the output's dtype anyway, and what one thread wrote there others read.
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
    x, weight_ptr, window_ptr, o_c, has_window, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W: tl.constexpr
):
    """silu of the convolution of channels o_c, whose newest column is x; in x's dtype."""
    total = x.to(tl.float32) * tl.load(weight_ptr + o_c * weight_stride_c + (W - 1) * weight_stride_w).to(tl.float32)
    for j in tl.static_range(W - 1):
        column = tl.load(window_ptr + o_c * conv_stride_c + j * conv_stride_w, mask=has_window & (o_c >= 0), other=0.0)
        total += column.to(tl.float32) * tl.load(weight_ptr + o_c * weight_stride_c + j * weight_stride_w).to(tl.float32)
    return silu(total).to(x.dtype)


@triton.jit
def store_window(x, source_ptr, target_ptr, o_c, has_window, moves, conv_stride_c, conv_stride_w, W: tl.constexpr):
    """The window after x, or the one before it unless `moves`. Source and target may be the same: columns go in order."""
    for j in tl.static_range(W - 1):
        here = tl.load(source_ptr + o_c * conv_stride_c + j * conv_stride_w, mask=has_window & (o_c >= 0), other=0.0)
        if j < W - 2:
            newer = tl.load(
                source_ptr + o_c * conv_stride_c + (j + 1) * conv_stride_w, mask=has_window & (o_c >= 0), other=0.0
            )
        else:
            newer = x.to(here.dtype)
        tl.store(target_ptr + o_c * conv_stride_c + j * conv_stride_w, tl.where(moves, newer, here))


@triton.jit
def advance(tile, v_ptr, q, k, decay, beta, moves, BLOCK_V: tl.constexpr):
    """(rows of the state after the token, or as they are unless `moves`; what the query reads from them).

    S' = decay S + u k^T, so S' q = decay (S q) + u (k . q): key and query meet the state as it was read.
    """
    o_v = tl.arange(0, BLOCK_V)
    v = tl.load(v_ptr + o_v, mask=moves & (o_v >= 0), other=0.0).to(tl.float32)
    held = tl.sum(tile * k[None, :], 1)
    answer = tl.sum(tile * q[None, :], 1)
    update = beta * (v - decay * held)
    o = decay * answer + update * tl.sum(k * q, 0)
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
    x_q = tl.load(x_ptr + c_q)
    x_k = tl.load(x_ptr + c_k)
    x_v = tl.load(x_ptr + c_v)
    v = convolve(x_v, conv_weight_ptr, window_ptr, c_v, has_state, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W)
    q = convolve(x_q, conv_weight_ptr, window_ptr, c_q, has_state, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W)
    k = convolve(x_k, conv_weight_ptr, window_ptr, c_k, has_state, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W)
    a = tl.load(a_ptr + row * a_stride_t + i_hv).to(tl.float32) + tl.load(dt_bias_ptr + i_hv).to(tl.float32)
    decay = tl.exp(-tl.exp(tl.load(A_log_ptr + i_hv).to(tl.float32)) * softplus(a))
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + row * b_stride_t + i_hv).to(tl.float32)))
    z = tl.load(z_ptr + row * z_stride_t + i_hv * V + o_v).to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + o_v).to(tl.float32)
    row_ptr = out_ptr + row * (HV * V) + i_hv * V
    tl.store(row_ptr + o_v, v, mask=has_token & (o_v >= 0))

    # Windows: a value head's own channels at once, the key head's by the last of its readers.
    tl.debug_barrier()
    writes = (target > 0) | (exports_count > 0)
    last = writes
    if GROUP > 1:
        if writes:
            last = tl.atomic_add(tickets_ptr + i_r * HK + i_hk, 1, sem="acq_rel") == GROUP - 1
    for i_e in range(exports_count):
        slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
        if (tl.load(exports_ptr + 3 * i_e) == i_r) & (slot > 0):
            moves = (tl.load(exports_ptr + 3 * i_e + 1) > 0) & has_token
            copy_ptr = conv_pool_ptr + slot * conv_stride_slot
            store_window(x_v, window_ptr, copy_ptr, c_v, has_state, moves, conv_stride_c, conv_stride_w, W)
            if last:
                store_window(x_q, window_ptr, copy_ptr, c_q, has_state, moves, conv_stride_c, conv_stride_w, W)
                store_window(x_k, window_ptr, copy_ptr, c_k, has_state, moves, conv_stride_c, conv_stride_w, W)
    if target > 0:
        copy_ptr = conv_pool_ptr + target * conv_stride_slot
        store_window(x_v, window_ptr, copy_ptr, c_v, has_state, has_token, conv_stride_c, conv_stride_w, W)
        if last:
            store_window(x_q, window_ptr, copy_ptr, c_q, has_state, has_token, conv_stride_c, conv_stride_w, W)
            store_window(x_k, window_ptr, copy_ptr, c_k, has_state, has_token, conv_stride_c, conv_stride_w, W)
    if GROUP > 1:
        if last:
            tl.store(tickets_ptr + i_r * HK + i_hk, 0)

    dtype = x_q.dtype
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    q = (q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * K**-0.5)).to(dtype).to(tl.float32)
    k = (k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)).to(dtype).to(tl.float32)

    for i_e in range(exports_count):
        slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
        after = tl.load(exports_ptr + 3 * i_e + 1)
        if (tl.load(exports_ptr + 3 * i_e) == i_r) & (slot > 0) & (after <= 1):
            moves = (after > 0) & has_token
            copy_ptr = state_pool_ptr + slot * state_stride_slot + i_hv * (V * K)
            for i_v in range(0, V, BLOCK_V):
                exported = tl.load(held_ptr + i_v * K + o_s, mask=has_state & (o_s >= 0), other=0.0)
                exported, _ = advance(exported, row_ptr + i_v, q, k, decay, beta, moves, BLOCK_V)
                tl.store(copy_ptr + i_v * K + o_s, exported)
    copy_ptr = state_pool_ptr + target * state_stride_slot + i_hv * (V * K)
    for i_v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        if not WHOLE:
            tile = tl.load(held_ptr + i_v * K + o_s, mask=has_state & (o_s >= 0), other=0.0)
        written, o = advance(tile, row_ptr + i_v, q, k, decay, beta, has_token, BLOCK_V)
        tl.store(copy_ptr + i_v * K + o_s, written, mask=(target > 0) & (o_s >= 0))
        o_t = i_v + tl.arange(0, BLOCK_V)
        tl.store(row_ptr + o_t, o.to(dtype), mask=has_token & (o_t >= 0))

    tl.debug_barrier()
    if has_token:
        o = tl.load(row_ptr + o_v).to(tl.float32)
        y = (o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)).to(dtype).to(tl.float32)
        product = y * norm_weight
        if ROUND_PRODUCT:
            product = product.to(dtype).to(tl.float32)
        tl.store(row_ptr + o_v, (product * silu(z)).to(dtype))
