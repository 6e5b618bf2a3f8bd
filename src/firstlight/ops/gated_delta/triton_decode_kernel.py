"""The kernel of `triton_decode`. Letters: B T H HK HV K V as in the op; W taps of the convolution.

A state tile is held as [K / LANES, V, LANES]: a row's keys lie in few lanes of a warp, each lane holding several runs of
four, so that a sum over keys is mostly additions inside a thread.
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
    LANES: tl.constexpr,
    W: tl.constexpr,
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

    # The state is most of what is read: ask for it first.
    o_j = tl.arange(0, K // LANES)
    o_l = tl.arange(0, LANES)
    o_v = tl.arange(0, V)
    o_s = i_hv * (V * K) + o_v[None, :, None] * K + (o_j[:, None, None] * LANES + o_l[None, None, :])
    state = tl.load(state_pool_ptr + source * state_stride_slot + o_s, mask=has_state & (o_s >= 0), other=0.0)

    x_ptr = mixed_ptr + row * mixed_stride_t
    window_ptr = conv_pool_ptr + source * conv_stride_slot
    o_q = i_hk * K + o_j[:, None] * LANES + o_l[None, :]
    o_k = HK * K + o_q
    o_u = 2 * HK * K + i_hv * V + o_v
    x_q = tl.load(x_ptr + o_q)
    x_k = tl.load(x_ptr + o_k)
    x_v = tl.load(x_ptr + o_u)
    q = convolve(x_q, conv_weight_ptr, window_ptr, o_q, has_state, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W)
    k = convolve(x_k, conv_weight_ptr, window_ptr, o_k, has_state, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W)
    v = convolve(x_v, conv_weight_ptr, window_ptr, o_u, has_state, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_w, W)
    a = tl.load(a_ptr + row * a_stride_t + i_hv).to(tl.float32) + tl.load(dt_bias_ptr + i_hv).to(tl.float32)
    decay = tl.exp(-tl.exp(tl.load(A_log_ptr + i_hv).to(tl.float32)) * softplus(a))
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + row * b_stride_t + i_hv).to(tl.float32)))
    z = tl.load(z_ptr + row * z_stride_t + i_hv * V + o_v).to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + o_v).to(tl.float32)

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
            store_window(x_v, window_ptr, copy_ptr, o_u, has_state, moves, conv_stride_c, conv_stride_w, W)
            if last:
                store_window(x_q, window_ptr, copy_ptr, o_q, has_state, moves, conv_stride_c, conv_stride_w, W)
                store_window(x_k, window_ptr, copy_ptr, o_k, has_state, moves, conv_stride_c, conv_stride_w, W)
    if target > 0:
        copy_ptr = conv_pool_ptr + target * conv_stride_slot
        store_window(x_v, window_ptr, copy_ptr, o_u, has_state, has_token, conv_stride_c, conv_stride_w, W)
        if last:
            store_window(x_q, window_ptr, copy_ptr, o_q, has_state, has_token, conv_stride_c, conv_stride_w, W)
            store_window(x_k, window_ptr, copy_ptr, o_k, has_state, has_token, conv_stride_c, conv_stride_w, W)
    if GROUP > 1:
        if last:
            tl.store(tickets_ptr + i_r * HK + i_hk, 0)

    dtype = x_q.dtype
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    q = (q * (tl.rsqrt(tl.sum(tl.sum(q * q, 1), 0) + 1e-6) * K**-0.5)).to(dtype).to(tl.float32)
    k = (k * tl.rsqrt(tl.sum(tl.sum(k * k, 1), 0) + 1e-6)).to(dtype).to(tl.float32)

    # S' = decay S + u k^T, so S' q = decay (S q) + u (k . q): key and query meet the state as it was read.
    held = tl.sum(tl.sum(state * k[:, None, :], 0), 1)
    answer = tl.sum(tl.sum(state * q[:, None, :], 0), 1)
    update = beta * (v.to(tl.float32) - decay * held)
    overlap = tl.sum(tl.sum(k * q, 1), 0)
    o = (decay * answer + update * overlap).to(dtype).to(tl.float32)

    for i_e in range(exports_count):
        slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
        after = tl.load(exports_ptr + 3 * i_e + 1)
        if (tl.load(exports_ptr + 3 * i_e) == i_r) & (slot > 0) & (after <= 1):
            if (after > 0) & has_token:
                exported = state * decay + update[None, :, None] * k[:, None, :]
            else:
                exported = state
            tl.store(state_pool_ptr + slot * state_stride_slot + o_s, exported)
    if target > 0:
        if has_token:
            state = state * decay + update[None, :, None] * k[:, None, :]
        tl.store(state_pool_ptr + target * state_stride_slot + o_s, state)

    if has_token:
        y = (o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)).to(dtype).to(tl.float32)
        product = y * norm_weight
        if ROUND_PRODUCT:
            product = product.to(dtype).to(tl.float32)
        tl.store(out_ptr + row * (HV * V) + i_hv * V + o_v, (product * silu(z)).to(dtype))
