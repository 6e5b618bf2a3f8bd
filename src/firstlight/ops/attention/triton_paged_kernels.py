"""The kernels of `triton_paged`. Rows m are (token, head of the group) pairs, columns n are keys."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    pages_ptr,
    row_ptr,
    query_start_ptr,
    length_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    summary_ptr,
    scale,
    requests,
    window,
    q_stride_t,
    q_stride_h,
    k_stride_page,
    k_stride_s,
    k_stride_h,
    v_stride_page,
    v_stride_s,
    v_stride_h,
    pages_stride_row,
    out_stride_t,
    out_stride_h,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    GROUP: tl.constexpr = H // KV
    i_kv = (tl.program_id(0) // SPLITS).to(tl.int64)
    i_s = tl.program_id(0) % SPLITS
    if ONE_BLOCK:
        i_r = tl.program_id(1)
        i_b = 0
    else:
        # The last blocks of a request see the longest contexts: they start first.
        i_p = tl.num_programs(1) - 1 - tl.program_id(1)
        o_r = tl.arange(0, BLOCK_R)
        m_r = o_r < requests
        counts = tl.load(query_start_ptr + o_r + 1, mask=m_r, other=0) - tl.load(
            query_start_ptr + o_r, mask=m_r, other=0
        )
        ends = tl.cumsum((counts.to(tl.int32) + TOKENS - 1) // TOKENS, 0)
        i_r = tl.sum(((ends <= i_p) & m_r).to(tl.int32), 0)
        if i_r >= requests:
            return
        i_b = i_p - tl.max(tl.where((o_r < i_r) & m_r, ends, 0), 0)
    first = tl.load(query_start_ptr + i_r).to(tl.int64)
    count = (tl.load(query_start_ptr + i_r + 1).to(tl.int64) - first).to(tl.int32)
    context = tl.load(length_ptr + i_r).to(tl.int32)
    table_ptr = pages_ptr + tl.load(row_ptr + i_r).to(tl.int64) * pages_stride_row
    if i_b * TOKENS >= count:
        return

    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    token = i_b * TOKENS + o_m // GROUP
    head = i_kv * GROUP + o_m % GROUP
    m_m = (o_m < TOKENS * GROUP) & (token < count)
    m_d = o_d < D
    o_t = first + token
    index = context - count + token
    p_q = q_ptr + o_t[:, None] * q_stride_t + head[:, None] * q_stride_h + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)

    end = context
    if CAUSAL:
        end = tl.minimum(context, context - count + i_b * TOKENS + TOKENS)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, context - count + i_b * TOKENS - window + 1) // BLOCK_N * BLOCK_N
    share = (tl.maximum(end - begin, 0) + SPLITS - 1) // SPLITS
    share = (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    start = begin + i_s * share
    stop = tl.minimum(start + share, end)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(start, stop, BLOCK_N):
        o_key = n + o_n
        if PAGE % BLOCK_N == 0:
            page = tl.load(table_ptr + n // PAGE).to(tl.int64)
            o_s = n % PAGE + o_n
            m_n = (o_key < stop) & (page > 0)
            p_k = k_ptr + page * k_stride_page + o_s[:, None] * k_stride_s + i_kv * k_stride_h + o_d[None, :]
            p_v = v_ptr + page * v_stride_page + o_s[:, None] * v_stride_s + i_kv * v_stride_h + o_d[None, :]
        else:
            b_page = tl.load(table_ptr + o_key // PAGE, mask=o_key < stop, other=0).to(tl.int64)
            o_s = o_key % PAGE
            m_n = (o_key < stop) & (b_page > 0)
            p_k = k_ptr + b_page[:, None] * k_stride_page + o_s[:, None] * k_stride_s + i_kv * k_stride_h + o_d[None, :]
            p_v = v_ptr + b_page[:, None] * v_stride_page + o_s[:, None] * v_stride_s + i_kv * v_stride_h + o_d[None, :]
        b_k = tl.load(p_k, mask=m_n[:, None] & m_d[None, :], other=0.0).to(b_q.dtype)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (scale * LOG2_E)
        seen = m_n[None, :] & m_m[:, None]
        if CAUSAL:
            seen = seen & (o_key[None, :] <= index[:, None])
        if HAS_WINDOW:
            seen = seen & (o_key[None, :] > index[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        b_p = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(highest - safe)
        total = total * fade + tl.sum(b_p, 1)
        b_v = tl.load(p_v, mask=m_n[:, None] & m_d[None, :], other=0.0).to(b_q.dtype)
        acc = tl.dot(b_p.to(b_q.dtype), b_v, acc * fade[:, None], input_precision="ieee")
        highest = higher

    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=m_m, other=0.0).to(tl.float32) * LOG2_E
            higher = tl.maximum(highest, sink)
            fade = tl.exp2(highest - higher)
            total = total * fade + tl.exp2(sink - higher)
            acc = acc * fade[:, None]
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        p_out = out_ptr + o_t[:, None] * out_stride_t + head[:, None] * out_stride_h + o_d[None, :]
        tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_d[None, :])
    else:
        o_part = (o_t * H + head) * SPLITS + i_s
        tl.store(partial_ptr + o_part[:, None] * D + o_d[None, :], acc, mask=m_m[:, None] & m_d[None, :])
        tl.store(summary_ptr + o_part * 2, highest, mask=m_m)
        tl.store(summary_ptr + o_part * 2 + 1, total, mask=m_m)


@triton.jit
def merge_kernel(
    partial_ptr,
    summary_ptr,
    sinks_ptr,
    out_ptr,
    out_stride_t,
    out_stride_h,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Sum of the splits' results, each scaled from its own largest score to the largest of all."""
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    m_s = o_s < SPLITS
    o_part = (i_t * H + i_h) * SPLITS + o_s
    b_part = tl.load(
        partial_ptr + o_part[:, None] * D + o_d[None, :], mask=m_s[:, None] & (o_d < D)[None, :], other=0.0
    )
    highest = tl.load(summary_ptr + o_part * 2, mask=m_s, other=float("-inf"))
    total = tl.load(summary_ptr + o_part * 2 + 1, mask=m_s, other=0.0)
    higher = tl.max(highest, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + i_h).to(tl.float32) * LOG2_E
        higher = tl.maximum(higher, sink)
    higher = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(highest - higher)
    whole = tl.sum(total * weight, 0)
    if HAS_SINKS:
        whole += tl.exp2(sink - higher)
    result = tl.sum(b_part * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    p_out = out_ptr + i_t * out_stride_t + i_h * out_stride_h + o_d
    tl.store(p_out, result.to(out_ptr.dtype.element_ty), mask=o_d < D)
