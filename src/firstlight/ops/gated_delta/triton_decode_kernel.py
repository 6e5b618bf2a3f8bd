"""The kernels of `triton_decode`. Letters: T HK HV K V as in the op; W taps of the convolution."""

from __future__ import annotations

import triton
import triton.language as tl

from firstlight.ops.linear.triton_quantise import store_packed
from firstlight.ops.triton_launch import kernel

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def silu(x):
    # exp2 is an instruction, exp is five: it has to be right for denormal numbers too.
    return x / (1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def find_export(exports_ptr, exports_count, i_r, previous, BLOCK_E: tl.constexpr):
    """(whether the request has an export after row `previous`, the first such row, its number of tokens, its slot)."""
    o_e = tl.arange(0, BLOCK_E)
    inside = (o_e > previous) & (o_e < exports_count)
    slot = tl.load(exports_ptr + 3 * o_e + 2, mask=inside, other=0)
    own = inside & (tl.load(exports_ptr + 3 * o_e, mask=inside, other=-1) == i_r) & (slot > 0)
    after = tl.load(exports_ptr + 3 * o_e + 1, mask=inside, other=0)
    row = tl.min(tl.where(own, o_e, BLOCK_E), 0)
    chosen = o_e == row
    return row < BLOCK_E, row, tl.sum(tl.where(chosen, after, 0), 0), tl.sum(tl.where(chosen, slot, 0).to(tl.int64), 0)


@triton.jit
def store_window(window_ptr, columns, o_c, moves, conv_stride_c, conv_stride_w, W: tl.constexpr):
    """Stores the window of channels o_c. columns: W of them, the last is the token's: all but the first if the window `moves`,
    else all but the last."""
    for j in tl.static_range(W - 1):
        tl.store(window_ptr + o_c * conv_stride_c + j * conv_stride_w, tl.where(moves, columns[j + 1], columns[j]))


@triton.jit
def convolve_channels(
    x_ptr,
    weight_ptr,
    conv_pool_ptr,
    source,
    target,
    exports_ptr,
    exports_count,
    i_r,
    o_c,
    has_token,
    weight_stride_c,
    weight_stride_w,
    conv_stride_slot,
    conv_stride_c,
    conv_stride_w,
    W: tl.constexpr,
    HAS_EXPORTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """silu of the convolution of channels o_c at the token x_ptr, in its dtype. Writes their windows: those exported, and the
    one after the step."""
    # All is asked for before anything is used, and read once.
    window_ptr = conv_pool_ptr + source * conv_stride_slot
    columns = ()
    weights = ()
    for j in tl.static_range(W - 1):
        p_column = window_ptr + o_c * conv_stride_c + j * conv_stride_w
        columns += (tl.load(p_column, mask=(source > 0) & (o_c >= 0), other=0.0),)  # type: ignore[assignment]
    for j in tl.static_range(W):
        weights += (tl.load(weight_ptr + o_c * weight_stride_c + j * weight_stride_w),)  # type: ignore[assignment]
    if PDL:
        # The kernel before wrote what follows. Windows and slots are older than any kernel that may still run: what writes them
        # (a step before, copies, step_inputs) comes before the embedding, which lets none begin before it has waited.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + o_c)
    total = x.to(tl.float32) * weights[W - 1].to(tl.float32)
    for j in tl.static_range(W - 1):
        total += columns[j].to(tl.float32) * weights[j].to(tl.float32)
    columns += (x.to(conv_pool_ptr.dtype.element_ty),)
    if HAS_EXPORTS:
        found, row, after, slot = find_export(exports_ptr, exports_count, i_r, -1, BLOCK_E)
        while found:
            moves = (after > 0) & has_token
            store_window(conv_pool_ptr + slot * conv_stride_slot, columns, o_c, moves, conv_stride_c, conv_stride_w, W)
            found, row, after, slot = find_export(exports_ptr, exports_count, i_r, row, BLOCK_E)
    if target > 0:
        copy_ptr = conv_pool_ptr + target * conv_stride_slot
        store_window(copy_ptr, columns, o_c, has_token, conv_stride_c, conv_stride_w, W)
    return silu(total).to(x.dtype)


@triton.jit
def gate_row(o, z_ptr, weight, eps, V: tl.constexpr, ROUND_PRODUCT: tl.constexpr):
    """The gated norm of o [V], which has the output's dtype."""
    o_v = tl.arange(0, V)
    wide = o.to(tl.float32)
    y = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / V + eps)).to(o.dtype).to(tl.float32)
    product = y * weight.to(tl.float32)
    if ROUND_PRODUCT:
        product = product.to(o.dtype).to(tl.float32)
    return (product * silu(tl.load(z_ptr + o_v).to(tl.float32))).to(o.dtype)


@kernel
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
    HAS_EXPORTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
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
    if i_h < 2 * HK:
        c_k = i_h * K + tl.arange(0, K)
        k = convolve_channels(
            x_ptr,
            conv_weight_ptr,
            conv_pool_ptr,
            source,
            target,
            exports_ptr,
            exports_count,
            i_r,
            c_k,
            has_token,
            weight_stride_c,
            weight_stride_w,
            conv_stride_slot,
            conv_stride_c,
            conv_stride_w,
            W,
            HAS_EXPORTS,
            BLOCK_E,
            PDL,
        )
        wide = k.to(tl.float32)
        scale = tl.where(i_h < HK, K**-0.5, 1.0)
        k = (wide * (tl.rsqrt(tl.sum(wide * wide, 0) + 1e-6) * scale)).to(k.dtype)
        # Without a token a state stays as it is: its key is zeros, its decay 1.
        tl.store(y_ptr + c_k, tl.where(has_token, k, 0.0).to(k.dtype))
    else:
        i_hv = i_h - 2 * HK
        dt_bias = tl.load(dt_bias_ptr + i_hv).to(tl.float32)
        A_log = tl.load(A_log_ptr + i_hv).to(tl.float32)
        c_v = 2 * HK * K + i_hv * V + tl.arange(0, V)
        v = convolve_channels(
            x_ptr,
            conv_weight_ptr,
            conv_pool_ptr,
            source,
            target,
            exports_ptr,
            exports_count,
            i_r,
            c_v,
            has_token,
            weight_stride_c,
            weight_stride_w,
            conv_stride_slot,
            conv_stride_c,
            conv_stride_w,
            W,
            HAS_EXPORTS,
            BLOCK_E,
            PDL,
        )
        tl.store(y_ptr + c_v, tl.where(has_token, v, 0.0).to(v.dtype))
        a = tl.load(a_ptr + row * a_stride_t + i_hv).to(tl.float32) + dt_bias
        b = tl.load(b_ptr + row * b_stride_t + i_hv).to(tl.float32)
        decay = tl.exp(-tl.exp(A_log) * softplus(a))
        beta = 1.0 / (1.0 + tl.exp(-b))
        tl.store(gates_ptr + (i_r * HV + i_hv) * 2, tl.where(has_token, decay, 1.0))
        tl.store(gates_ptr + (i_r * HV + i_hv) * 2 + 1, tl.where(has_token, beta, 0.0))


@triton.jit
def export_state(
    state_pool_ptr,
    exports_ptr,
    exports_count,
    state_stride_slot,
    i_r,
    o_s,
    state,
    AFTER_TOKEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Stores a state in the slots of the request's exports from before the token, or from after it."""
    found, row, after, slot = find_export(exports_ptr, exports_count, i_r, -1, BLOCK_E)
    while found:
        if after == 1 if AFTER_TOKEN else after <= 0:
            tl.store(state_pool_ptr + slot * state_stride_slot + o_s, state)
        found, row, after, slot = find_export(exports_ptr, exports_count, i_r, row, BLOCK_E)


@kernel
def streaming_kernel(
    columns_ptr,
    gates_ptr,
    z_ptr,
    norm_weight_ptr,
    state_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    state_out_ptr,
    exports_ptr,
    tickets_ptr,
    out_ptr,
    normed_ptr,
    data_ptr,
    scale_ptr,
    eps,
    exports_count,
    z_stride_t,
    state_stride_slot,
    scale_stride_t,
    scale_stride_k,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
    NORM: tl.constexpr,
    HAS_EXPORTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """The recurrence of BLOCK_V values of one head to out; with NORM, its gated norm by a head's last program: plain to normed, which may
    be out, packed, or both.

    A warp has a row of the state's tile [BLOCK_V, K] at a time, so that of a key or a query a thread holds a few numbers only:
    few registers, and many programs with their bytes in flight.
    """
    SLICES: tl.constexpr = V // BLOCK_V
    i_hv = tl.program_id(0) // SLICES
    i_v = tl.program_id(0) % SLICES
    i_r = tl.program_id(1).to(tl.int64)
    source = tl.load(state_in_ptr + i_r).to(tl.int64)
    target = tl.load(state_out_ptr + i_r).to(tl.int64)
    row = tl.load(query_start_ptr + i_r).to(tl.int64)
    has_token = tl.load(query_start_ptr + i_r + 1).to(tl.int64) > row
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, K)
    o_s = i_hv * (V * K) + o_v[:, None] * K + o_k[None, :]
    # A null slot may be read; masks would cost registers.
    state = tl.load(state_pool_ptr + tl.maximum(source, 0) * state_stride_slot + o_s).to(tl.float32)
    if NORM:
        weight = tl.load(norm_weight_ptr + tl.arange(0, V))
    if PDL:
        # The kernel before wrote what follows, and no states.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y_ptr = columns_ptr + i_r * (2 * HK * K + HV * V)
    q = tl.load(y_ptr + i_hv // (HV // HK) * K + o_k).to(tl.float32)
    k = tl.load(y_ptr + HK * K + i_hv // (HV // HK) * K + o_k).to(tl.float32)
    v = tl.load(y_ptr + 2 * HK * K + i_hv * V + o_v).to(tl.float32)
    decay = tl.load(gates_ptr + (i_r * HV + i_hv) * 2)
    beta = tl.load(gates_ptr + (i_r * HV + i_hv) * 2 + 1)
    if source <= 0:
        state = tl.zeros_like(state)
    if HAS_EXPORTS:
        export_state(state_pool_ptr, exports_ptr, exports_count, state_stride_slot, i_r, o_s, state, False, BLOCK_E)
    # S' = decay S + u k^T, so S' q = decay (S q) + u (k . q): key and query meet the state as it was read.
    held = tl.sum(state * k[None, :], 1)
    answer = tl.sum(state * q[None, :], 1)
    update = beta * (v - decay * held)
    o = decay * answer + update * tl.sum(k * q, 0)
    row_ptr = out_ptr + row * (HV * V) + i_hv * V
    tl.store(row_ptr + o_v, o.to(out_ptr.dtype.element_ty), mask=has_token & (o_v >= 0))
    state = state * decay + update[:, None] * k[None, :]
    if HAS_EXPORTS:
        export_state(state_pool_ptr, exports_ptr, exports_count, state_stride_slot, i_r, o_s, state, True, BLOCK_E)
    if target > 0:
        tl.store(state_pool_ptr + target * state_stride_slot + o_s, state)
    if NORM:  # noqa: SIM102  (decided when compiling; the other one when running)
        if has_token:
            tl.debug_barrier()
            ticket_ptr = tickets_ptr + i_r * HV + i_hv
            if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == SLICES - 1:
                tl.store(ticket_ptr, 0)
                whole = tl.load(row_ptr + tl.arange(0, V), cache_modifier=".cg")
                y = gate_row(whole, z_ptr + row * z_stride_t + i_hv * V, weight, eps, V, ROUND_PRODUCT)
                first = row * HV + i_hv
                if normed_ptr is not None:
                    tl.store(normed_ptr + first * V + tl.arange(0, V), y)
                if data_ptr is not None:
                    store_packed(
                        y, first, first + 1, 0, V, data_ptr, scale_ptr, scale_stride_t, scale_stride_k, HV, 1, V
                    )
