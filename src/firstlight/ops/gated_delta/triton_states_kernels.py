"""The kernels of `triton_chunked` that carry states from chunk to chunk. Letters as in `triton_chunked_kernels`.

States are float32 here, whatever the pool's dtype, and lie as they do there, [V, K]: each product has then the state or the updates on its left, where the matrix
units read them from the registers that the product before left them in, and tokens on its right, which come from memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firstlight.ops.gated_delta.triton_chunked_kernels import chunks_before
from firstlight.ops.gated_delta.triton_decode_kernel import find_export, silu
from firstlight.ops.triton_launch import kernel


@triton.jit
def request_chunks(query_start_ptr, i_r, requests, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr):
    """(the step's chunks before the request's, its first token, its tokens)."""
    o_r, ends = chunks_before(query_start_ptr, requests, BLOCK_R, CHUNK)
    i_n = tl.max(tl.where(o_r < i_r, ends, 0), 0).to(tl.int64)
    first = tl.load(query_start_ptr + i_r).to(tl.int64)
    return i_n, first, (tl.load(query_start_ptr + i_r + 1).to(tl.int64) - first).to(tl.int32)


@triton.jit
def segment_row(query_start_ptr, i_r, segment_chunks, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr):
    """Where the states at the starts of a request's segments are: the segments of those before it that have more than one."""
    o_r = tl.arange(0, BLOCK_R)
    before = tl.load(query_start_ptr + o_r, mask=o_r < i_r, other=0).to(tl.int32)
    after = tl.load(query_start_ptr + o_r + 1, mask=o_r < i_r, other=0).to(tl.int32)
    own = tl.cdiv(tl.cdiv(after - before, CHUNK), segment_chunks)
    return tl.sum(tl.where(own > 1, own, 0), 0).to(tl.int64)


@triton.jit
def chunk_updates(S, k, v, X, E):
    """u [rows, 64] of a chunk, S [rows, K] being the state before it and E [64] the decays since; k, X: [64, ...], v: [64, rows]."""
    held = tl.dot(S, tl.trans(k), input_precision="ieee") * E[None, :]
    u = tl.dot(tl.trans(v), tl.trans(X), input_precision="ieee")
    return tl.dot((-held).to(k.dtype), tl.trans(X), u, input_precision="ieee")


@kernel
def transitions_kernel(
    columns_ptr,
    inverse_ptr,
    decays_ptr,
    state_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    starts_ptr,
    transitions_ptr,
    requests,
    segment_chunks,
    state_stride_slot,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """What a segment makes of a state of zeros (of the request's, in the first one), and of each unit vector of keys."""
    ROWS: tl.constexpr = (V + K) // BLOCK
    C: tl.constexpr = 2 * HK * K + HV * V
    i_hv = tl.program_id(0) // ROWS
    i_b = tl.program_id(0) % ROWS
    i_r = tl.program_id(1)
    i_s = tl.program_id(2)
    i_n, first, count = request_chunks(query_start_ptr, i_r, requests, BLOCK_R, CHUNK)
    begin = i_s * segment_chunks
    end = begin + segment_chunks
    of_values = i_b < V // BLOCK
    if (end * CHUNK >= count) | ((i_s == 0) & (i_b >= V // BLOCK)):
        return
    o_i = tl.arange(0, CHUNK)
    o_k = tl.arange(0, K)
    o_v = i_b * BLOCK + tl.arange(0, BLOCK)  # a value, or V more than a key
    source = tl.load(state_in_ptr + i_r).to(tl.int64)
    held_ptr = state_pool_ptr + source * state_stride_slot + i_hv * (V * K)
    seeded = of_values & (source > 0) & (i_s == 0)
    S = tl.load(held_ptr + o_v[:, None] * K + o_k[None, :], mask=seeded & (o_v[:, None] < V), other=0.0)
    S = tl.where(o_v[:, None] == V + o_k[None, :], 1.0, S.to(tl.float32))
    p_k = columns_ptr + HK * K + i_hv // (HV // HK) * K + o_i[:, None] * C + o_k[None, :]
    p_v = columns_ptr + 2 * HK * K + i_hv * V + o_i[:, None] * C + o_v[None, :]
    p_x = inverse_ptr + i_hv * (CHUNK * CHUNK) + o_i[:, None] * CHUNK + o_i[None, :]
    p_e = decays_ptr + i_hv * (4 * CHUNK)
    for i_c in range(begin, end):
        row = (first + i_c * CHUNK) * C
        i_x = (i_n + i_c) * HV
        k = tl.load(p_k + row)
        v = tl.load(p_v + row, mask=of_values & (o_i[:, None] >= 0), other=0.0)
        X = tl.load(p_x + i_x * (CHUNK * CHUNK))
        E = tl.load(p_e + i_x * (4 * CHUNK) + CHUNK + o_i)
        F = tl.load(p_e + i_x * (4 * CHUNK) + 2 * CHUNK + o_i)
        whole = tl.load(p_e + i_x * (4 * CHUNK) + 2 * CHUNK - 1)
        u = chunk_updates(S.to(k.dtype), k, v, X, E)
        S = tl.dot((u * F[None, :]).to(k.dtype), k, S * whole, input_precision="ieee")
    i_m = (segment_row(query_start_ptr, i_r, segment_chunks, BLOCK_R, CHUNK) + i_s) * HV + i_hv
    if of_values:
        tl.store(starts_ptr + (i_m + HV) * (V * K) + o_v[:, None] * K + o_k[None, :], S)
    else:
        tl.store(transitions_ptr + i_m * (K * K) + (o_v - V)[:, None] * K + o_k[None, :], S)


@kernel
def fold_kernel(
    state_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    starts_ptr,
    transitions_ptr,
    segment_chunks,
    state_stride_slot,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The states at the segments' starts: those that come from zeros, and what the transitions make of the one before."""
    i_hv = tl.program_id(0) // (V // BLOCK)
    i_b = tl.program_id(0) % (V // BLOCK)
    i_r = tl.program_id(1)
    count = (tl.load(query_start_ptr + i_r + 1).to(tl.int64) - tl.load(query_start_ptr + i_r).to(tl.int64)).to(tl.int32)
    segments = tl.cdiv(count, segment_chunks * CHUNK)
    if segments < 2:
        return
    source = tl.load(state_in_ptr + i_r).to(tl.int64)
    o_k = tl.arange(0, K)
    o_s = (i_b * BLOCK + tl.arange(0, BLOCK))[:, None] * K + o_k[None, :]
    held_ptr = state_pool_ptr + source * state_stride_slot + i_hv * (V * K)
    i_m = segment_row(query_start_ptr, i_r, segment_chunks, BLOCK_R, CHUNK) * HV + i_hv
    p_start = starts_ptr + i_m * (V * K) + o_s
    # The first segment's too: its program may run after another has written the slot.
    held = tl.load(held_ptr + o_s, mask=(source > 0) & (o_s >= 0), other=0.0)
    tl.store(p_start, held.to(tl.float32))
    p_start += HV * (V * K)
    p_transition = transitions_ptr + i_m * (K * K) + o_k[:, None] * K + o_k[None, :]
    S = tl.load(p_start)
    for _ in tl.range(2, segments, num_stages=1):
        p_start += HV * (V * K)
        p_transition += HV * (K * K)
        S = tl.dot(S, tl.load(p_transition), tl.load(p_start), input_precision=PRECISION)
        tl.store(p_start, S)


@triton.jit
def export_states(
    state_pool_ptr,
    exports_ptr,
    exports_count,
    state_stride_slot,
    i_r,
    count,
    chunk,
    o_s,
    S,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Stores S in the slots of all exports of the request from the chunk that S stands before."""
    found, row, after, slot = find_export(exports_ptr, exports_count, i_r, -1, BLOCK_E)
    while found:
        after = tl.maximum(after, 0)
        if (after <= count) & (after // CHUNK == chunk):
            tl.store(state_pool_ptr + slot * state_stride_slot + o_s, S)
        found, row, after, slot = find_export(exports_ptr, exports_count, i_r, row, BLOCK_E)


@triton.jit
def next_export(exports_ptr, exports_count, i_r, chunk, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """The first chunk after `chunk` that the request exports from, or a very large number."""
    o_e = tl.arange(0, BLOCK_E)
    inside = o_e < exports_count
    at = tl.maximum(tl.load(exports_ptr + 3 * o_e + 1, mask=inside, other=0).to(tl.int32), 0) // CHUNK
    mine = inside & (tl.load(exports_ptr + 3 * o_e, mask=inside, other=-1) == i_r) & (at > chunk)
    mine = mine & (tl.load(exports_ptr + 3 * o_e + 2, mask=inside, other=0) > 0)
    return tl.min(tl.where(mine, at, 2**30), 0)


@kernel
def states_kernel(
    columns_ptr,
    inverse_ptr,
    scores_ptr,
    decays_ptr,
    z_ptr,
    norm_weight_ptr,
    state_pool_ptr,
    query_start_ptr,
    state_in_ptr,
    state_out_ptr,
    exports_ptr,
    starts_ptr,
    out_ptr,
    eps,
    exports_count,
    requests,
    segment_chunks,
    z_stride_t,
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
    HAS_SEGMENTS: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
):
    """Outputs and states of a segment of a request, for BLOCK_V of a head's values; with NORM, for all of them, the gated norm."""
    SLICES: tl.constexpr = V // BLOCK_V
    C: tl.constexpr = 2 * HK * K + HV * V
    i_hv = tl.program_id(0) // SLICES
    i_v = tl.program_id(0) % SLICES
    i_r = tl.program_id(1)
    i_n, first, count = request_chunks(query_start_ptr, i_r, requests, BLOCK_R, CHUNK)
    chunks = tl.cdiv(count, CHUNK)
    source = tl.load(state_in_ptr + i_r).to(tl.int64)
    target = tl.load(state_out_ptr + i_r).to(tl.int64)
    o_i = tl.arange(0, CHUNK)
    o_k = tl.arange(0, K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_s = i_hv * (V * K) + o_v[:, None] * K + o_k[None, :]
    p_held = state_pool_ptr + source * state_stride_slot + o_s
    if HAS_SEGMENTS:
        i_s = tl.program_id(2)
        begin = i_s * segment_chunks
        end = tl.minimum(begin + segment_chunks, chunks)
        if (begin >= chunks) & (i_s > 0):
            return
        if count > segment_chunks * CHUNK:
            i_m = segment_row(query_start_ptr, i_r, segment_chunks, BLOCK_R, CHUNK) + i_s
            S = tl.load(starts_ptr + i_m * (HV * V * K) + o_s)
        else:
            S = tl.load(p_held, mask=(source > 0) & (o_s >= 0), other=0.0).to(tl.float32)
    else:
        begin = 0
        end = chunks
        S = tl.load(p_held, mask=(source > 0) & (o_s >= 0), other=0.0).to(tl.float32)
    final = end == chunks
    p_q = columns_ptr + i_hv // (HV // HK) * K + o_i[:, None] * C + o_k[None, :]
    p_v = columns_ptr + 2 * HK * K + i_hv * V + o_i[:, None] * C + o_v[None, :]
    o_x = i_hv * (CHUNK * CHUNK) + o_i[:, None] * CHUNK + o_i[None, :]
    p_e = decays_ptr + i_hv * (4 * CHUNK)
    p_out = out_ptr + i_hv * V + o_i[None, :] * (HV * V) + o_v[:, None]
    dtype = out_ptr.dtype.element_ty
    if NORM:
        p_z = z_ptr + i_hv * V + o_i[None, :] * z_stride_t + o_v[:, None]
        norm_weight = tl.load(norm_weight_ptr + o_v).to(tl.float32)[:, None]
    done = begin
    while done <= end:
        stop = end
        if HAS_EXPORTS:
            if (done < end) | final:
                export_states(
                    state_pool_ptr,
                    exports_ptr,
                    exports_count,
                    state_stride_slot,
                    i_r,
                    count,
                    done,
                    o_s,
                    S,
                    BLOCK_E,
                    CHUNK,
                )
            stop = tl.minimum(end, next_export(exports_ptr, exports_count, i_r, done, BLOCK_E, CHUNK))
        for i_c in range(done, stop):
            inside = i_c * CHUNK + o_i < count
            real = inside[:, None]
            row = first + i_c * CHUNK
            i_x = (i_n + i_c) * HV
            k = tl.load(p_q + HK * K + row * C, mask=real, other=0.0)
            q = tl.load(p_q + row * C, mask=real, other=0.0)
            v = tl.load(p_v + row * C, mask=real, other=0.0)
            X = tl.load(inverse_ptr + i_x * (CHUNK * CHUNK) + o_x)
            P = tl.load(scores_ptr + i_x * (CHUNK * CHUNK) + o_x)
            E = tl.load(p_e + i_x * (4 * CHUNK) + CHUNK + o_i)
            F = tl.load(p_e + i_x * (4 * CHUNK) + 2 * CHUNK + o_i)
            whole = tl.load(p_e + i_x * (4 * CHUNK) + 2 * CHUNK - 1)
            if NORM:
                z = tl.load(p_z + row * z_stride_t, mask=inside[None, :], other=0.0)
            known = S.to(k.dtype)
            u = chunk_updates(known, k, v, X, E)
            asked = tl.dot(known, tl.trans(q), input_precision="ieee") * E[None, :]
            S = tl.dot((u * F[None, :]).to(k.dtype), k, S * whole, input_precision="ieee")
            o = tl.dot(u.to(P.dtype), tl.trans(P), asked, input_precision="ieee").to(dtype)
            if NORM:
                wide = o.to(tl.float32)
                scale = tl.rsqrt(tl.sum(wide * wide, 0) / V + eps)
                product = (wide * scale[None, :]).to(dtype).to(tl.float32) * norm_weight
                if ROUND_PRODUCT:
                    product = product.to(dtype).to(tl.float32)
                o = (product * silu(z.to(tl.float32))).to(dtype)
            tl.store(p_out + row * (HV * V), o, mask=inside[None, :])
        done = tl.where(stop > done, stop, end + 1)
    if final & (target > 0):
        tl.store(state_pool_ptr + target * state_stride_slot + o_s, S)


@kernel
def exports_kernel(
    columns_ptr,
    decays_ptr,
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
    """Takes exported states from the start of a chunk, where `states_kernel` left them, to a token inside it, one by one.

    In a pool of bfloat16 such a state has then been rounded at the chunk's start as well: keeping it wide in between would take
    memory for every export.
    """
    SLICES: tl.constexpr = V // BLOCK_V
    C: tl.constexpr = 2 * HK * K + HV * V
    i_hv = tl.program_id(0) // SLICES
    i_v = tl.program_id(0) % SLICES
    i_e = tl.program_id(1)
    i_r = tl.load(exports_ptr + 3 * i_e).to(tl.int32)
    after = tl.load(exports_ptr + 3 * i_e + 1).to(tl.int32)
    slot = tl.load(exports_ptr + 3 * i_e + 2).to(tl.int64)
    part = after % CHUNK
    if (slot <= 0) | (after <= 0) | (part == 0) | (i_r < 0) | (i_r >= requests):
        return
    i_n, first, count = request_chunks(query_start_ptr, i_r, requests, BLOCK_R, CHUNK)
    if after > count:
        return
    o_k = tl.arange(0, K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    p_state = state_pool_ptr + slot * state_stride_slot + i_hv * (V * K) + o_v[:, None] * K + o_k[None, :]
    S = tl.load(p_state).to(tl.float32)
    y_ptr = columns_ptr + (first + after // CHUNK * CHUNK) * C
    p_k = y_ptr + HK * K + i_hv // (HV // HK) * K + o_k
    p_v = y_ptr + 2 * HK * K + i_hv * V + o_v
    p_g = decays_ptr + ((i_n + after // CHUNK) * HV + i_hv) * (4 * CHUNK)
    before = 0.0
    for i in range(part):
        k = tl.load(p_k + i * C).to(tl.float32)
        G = tl.load(p_g + i)
        S *= tl.exp2(G - before)
        u = tl.load(p_g + 3 * CHUNK + i) * (tl.load(p_v + i * C).to(tl.float32) - tl.sum(S * k[None, :], 1))
        S += u[:, None] * k[None, :]
        before = G
    tl.store(p_state, S)
