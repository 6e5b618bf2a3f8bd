"""The kernels of `triton_paged`. Rows m are (token, head of the group) pairs, columns n are keys."""

from __future__ import annotations

import triton
import triton.language as tl

from firstlight.ops.triton_launch import kernel

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_request(i_r, query_start_ptr, length_ptr, pages_ptr, row_ptr, pages_stride_row):
    """A request's first token, how many it has, its context with them, and the addresses of its pages' numbers."""
    first = tl.load(query_start_ptr + i_r).to(tl.int64)
    count = (tl.load(query_start_ptr + i_r + 1).to(tl.int64) - first).to(tl.int32)
    context = tl.load(length_ptr + i_r).to(tl.int32)
    return first, count, context, pages_ptr + tl.load(row_ptr + i_r).to(tl.int64) * pages_stride_row


@triton.jit
def load_pages(table_ptr, n, last, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Where keys n .. n + BLOCK_N - 1 lie: their page if they share one, else a page for each; those after `last` read its."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table_ptr + tl.minimum(n, last) // PAGE)
    else:
        return tl.load(table_ptr + tl.minimum(n + tl.arange(0, BLOCK_N), last) // PAGE)


@triton.jit
def load_rows(
    pool_ptr, page, o_s, m_n, o_d, i_kv, stride_page, stride_s, stride_h,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D] of keys or values of a KV head, converted from the pages' dtype; zeros where m_n is false."""
    p_page = pool_ptr + page.to(tl.int64) * stride_page + i_kv.to(tl.int64) * stride_h
    if PAGE % BLOCK_N != 0:
        p_page = p_page[:, None]
    m = m_n[:, None]
    if BLOCK_D > D:
        m = m & (o_d < D)[None, :]
    return tl.load(p_page + o_s[:, None] * stride_s + o_d[None, :], mask=m, other=0.0).to(DTYPE)


@triton.jit
def add_keys(
    b_q, highest, total, acc, page, n, stop, index, unit, window, i_kv,
    k_ptr, v_ptr, k_stride_page, k_stride_s, k_stride_h, v_stride_page, v_stride_s, v_stride_h,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """(largest score, sum of weights, sum of weighted values) of each row with keys n .. n + BLOCK_N - 1 below `stop`.

    page: of `load_pages`. index: where each row's token stands. WHOLE: every row sees all of these keys that have a page.
    """
    DTYPE: tl.constexpr = b_q.dtype
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_key = n + o_n
    o_s = n % PAGE + o_n if PAGE % BLOCK_N == 0 else o_key % PAGE
    m_n = (page > 0) & (o_n >= 0 if WHOLE else o_key < stop)
    b_k = load_rows(
        k_ptr, page, o_s, m_n, o_d, i_kv, k_stride_page, k_stride_s, k_stride_h, D, PAGE, BLOCK_D, BLOCK_N, DTYPE
    )
    scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if WHOLE and PAGE % BLOCK_N == 0:
        # Scores aren't masked and their scale is part of the exponent: one operation each. A null page gets weights of zero.
        higher = tl.maximum(highest, tl.where(page > 0, tl.max(scores, 1) * unit, float("-inf")))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        b_p = tl.exp2(scores * unit - tl.where(page > 0, safe, float("inf"))[:, None])
    else:
        seen = m_n[None, :]
        if CAUSAL and not WHOLE:
            seen = seen & (o_key[None, :] <= index[:, None])
        if HAS_WINDOW:
            seen = seen & (o_key[None, :] > index[:, None] - window)
        scores = tl.where(seen, scores * unit, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        b_p = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(highest - safe)
    total = total * fade + tl.sum(b_p, 1)
    b_v = load_rows(
        v_ptr, page, o_s, m_n, o_d, i_kv, v_stride_page, v_stride_s, v_stride_h, D, PAGE, BLOCK_D, BLOCK_N, DTYPE
    )
    acc = tl.dot(b_p.to(DTYPE), b_v, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def add_sinks(highest, total, acc, sinks_ptr, head, m_m):
    """(sum of weights, sum of weighted values) with each head's sink among the scores."""
    sink = tl.load(sinks_ptr + head, mask=m_m, other=0.0).to(tl.float32) * LOG2_E
    higher = tl.maximum(highest, sink)
    fade = tl.exp2(highest - higher)
    return total * fade + tl.exp2(sink - higher), acc * fade[:, None]


@kernel
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    pages_ptr,
    row_ptr,
    query_start_ptr,
    length_ptr,
    sinks_ptr,
    out_ptr,
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
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of TOKENS consecutive tokens of a request, against its whole context."""
    GROUP: tl.constexpr = H // KV
    i_kv = tl.program_id(0)
    # The last blocks of a request see the longest contexts: they start first.
    i_p = tl.num_programs(1) - 1 - tl.program_id(1)
    o_r = tl.arange(0, BLOCK_R)
    m_r = o_r < requests
    counts = tl.load(query_start_ptr + o_r + 1, mask=m_r, other=0) - tl.load(query_start_ptr + o_r, mask=m_r, other=0)
    ends = tl.cumsum((counts.to(tl.int32) + TOKENS - 1) // TOKENS, 0)
    i_r = tl.sum(((ends <= i_p) & m_r).to(tl.int32), 0)
    if i_r >= requests:
        return
    i_b = i_p - tl.max(tl.where((o_r < i_r) & m_r, ends, 0), 0)
    first, count, context, table_ptr = find_request(
        i_r, query_start_ptr, length_ptr, pages_ptr, row_ptr, pages_stride_row
    )

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    token = i_b * TOKENS + o_m // GROUP
    head = i_kv * GROUP + o_m % GROUP
    m_m = (o_m < TOKENS * GROUP) & (token < count)
    m_q = m_m[:, None] & (o_d < D)[None, :]
    o_t = first + token
    index = context - count + token
    p_q = q_ptr + o_t[:, None] * q_stride_t + head[:, None] * q_stride_h + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)

    before = context - count + i_b * TOKENS
    begin = 0
    end = tl.maximum(context, 0)
    whole = end // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(end, before + TOKENS)
        whole = tl.minimum(end, before + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        begin = tl.maximum(0, before - window + 1) // BLOCK_N * BLOCK_N
        whole = begin
    last = tl.maximum(end - 1, 0)

    unit = scale * LOG2_E
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    page = load_pages(table_ptr, begin, last, BLOCK_N, PAGE)
    for n in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        following = load_pages(table_ptr, n + BLOCK_N, last, BLOCK_N, PAGE)
        highest, total, acc = add_keys(
            b_q, highest, total, acc, page, n, end, index, unit, window, i_kv,
            k_ptr, v_ptr, k_stride_page, k_stride_s, k_stride_h, v_stride_page, v_stride_s, v_stride_h,
            D, PAGE, BLOCK_D, BLOCK_N, True, CAUSAL, False,
        )  # fmt: skip
        page = following
    # What is left is a tile or two, unless there is a window: then no tile is whole.
    for n in tl.range(whole, end, BLOCK_N, num_stages=STAGES if HAS_WINDOW else 1):
        page = load_pages(table_ptr, n, last, BLOCK_N, PAGE)
        highest, total, acc = add_keys(
            b_q, highest, total, acc, page, n, end, index, unit, window, i_kv,
            k_ptr, v_ptr, k_stride_page, k_stride_s, k_stride_h, v_stride_page, v_stride_s, v_stride_h,
            D, PAGE, BLOCK_D, BLOCK_N, False, CAUSAL, HAS_WINDOW,
        )  # fmt: skip

    if HAS_SINKS:
        total, acc = add_sinks(highest, total, acc, sinks_ptr, head, m_m)
    acc = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    p_out = out_ptr + o_t[:, None] * out_stride_t + head[:, None] * out_stride_h + o_d[None, :]
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_q)


@kernel
def split_kernel(
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
    window,
    splits,
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
    IS_SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """All new tokens of a request, against one of `splits` parts of its context."""
    GROUP: tl.constexpr = H // KV
    i_kv = tl.program_id(0) // splits
    i_s = tl.program_id(0) % splits
    i_r = tl.program_id(1)
    first, count, context, table_ptr = find_request(
        i_r, query_start_ptr, length_ptr, pages_ptr, row_ptr, pages_stride_row
    )
    if count <= 0:
        return

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    token = o_m // GROUP
    head = i_kv * GROUP + o_m % GROUP
    m_m = token < count
    m_q = m_m[:, None] & (o_d < D)[None, :]
    o_t = first + token
    index = context - count + token
    p_q = q_ptr + o_t[:, None] * q_stride_t + head[:, None] * q_stride_h + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)

    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, context - count - window + 1) // BLOCK_N * BLOCK_N
    share = (tl.maximum(context - begin, 0) + splits - 1) // splits
    share = (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    start = begin + i_s * share
    stop = tl.minimum(start + share, context)

    unit = scale * LOG2_E
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(start, stop, BLOCK_N):
        page = load_pages(table_ptr, n, stop - 1, BLOCK_N, PAGE)
        highest, total, acc = add_keys(
            b_q, highest, total, acc, page, n, stop, index, unit, window, i_kv,
            k_ptr, v_ptr, k_stride_page, k_stride_s, k_stride_h, v_stride_page, v_stride_s, v_stride_h,
            D, PAGE, BLOCK_D, BLOCK_N, False, CAUSAL, HAS_WINDOW,
        )  # fmt: skip

    if not IS_SPLIT:
        if HAS_SINKS:
            total, acc = add_sinks(highest, total, acc, sinks_ptr, head, m_m)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        p_out = out_ptr + o_t[:, None] * out_stride_t + head[:, None] * out_stride_h + o_d[None, :]
        tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_q)
    else:
        o_part = (o_t * H + head) * splits + i_s
        tl.store(partial_ptr + o_part[:, None] * D + o_d[None, :], acc, mask=m_q)
        tl.store(summary_ptr + o_part * 2, highest, mask=m_m)
        tl.store(summary_ptr + o_part * 2 + 1, total, mask=m_m)


@kernel
def merge_kernel(
    partial_ptr,
    summary_ptr,
    sinks_ptr,
    out_ptr,
    splits,
    out_stride_t,
    out_stride_h,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Sum of the splits' results, each scaled from its own largest score to the largest of all."""
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    m_s = o_s < splits
    o_part = (i_t * H + i_h) * splits + o_s
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
