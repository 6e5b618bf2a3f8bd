"""The kernel of `hopper_paged`, in Gluon: it says itself which warp does what, and when. Rows m are (token, head) pairs.

A program has 128 rows: 64 for each of two groups of four warps. Pages go from the pool to shared memory by TMA, asked for by a
warp that does nothing else, from the last to the first, and are handed over with barriers: `full` when a page has arrived,
`empty` when both groups are done with it. A group asks for the product of its queries and the next page before it multiplies this
page's weights and values, so that the softmax of the one overlaps the product of the other; and while one group computes its
softmax, the other has the matrix units.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from firstlight.ops.triton_launch import ONE_VARIANT

LOG2_E = gl.constexpr(1.4426950408889634)
WARPS = gl.constexpr(4)
"""Of a group that computes."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def locate_block(query_start_ptr, requests, i_p, BLOCK_R: gl.constexpr, TOKENS: gl.constexpr):
    """(request, block within it) of block i_p, where requests are cut in blocks of TOKENS; request >= requests: none."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    o_r = gl.arange(0, BLOCK_R, layout=LINE)
    m_r = o_r < requests
    counts = gl.load(query_start_ptr + o_r + 1, mask=m_r, other=0) - gl.load(query_start_ptr + o_r, mask=m_r, other=0)
    ends = gl.associative_scan((counts.to(gl.int32) + TOKENS - 1) // TOKENS, 0, _add)
    i_r = gl.sum(((ends <= i_p) & m_r).to(gl.int32), 0)
    return i_r, i_p - gl.max(gl.where((o_r < i_r) & m_r, ends, 0), 0)


@gluon.jit
def load_pages(
    k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, table_ptr, last, i_kv, STAGES: gl.constexpr
):  # fmt: skip
    """The warp that asks for pages last - 1, last - 2, ..., 0 of a request."""
    for i in range(last):
        page = gl.load(table_ptr + (last - 1 - i)).to(gl.int32)
        page = gl.where(page > 0, page, -1)  # out of bounds, which TMA reads as zeros: null pages may hold anything
        slot = i % STAGES
        turn = ((i // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), turn)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [page, 0, i_kv, 0], k_full.index(slot), k_smem.index(slot))
        mbarrier.wait(v_empty.index(slot), turn)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [page, 0, i_kv, 0], v_full.index(slot), v_smem.index(slot))


@gluon.jit
def mask_scores(scores, n, end, index, PAGE: gl.constexpr, CAUSAL: gl.constexpr, SCORES: gl.constexpr):
    """Scores of page n, -inf where a row doesn't see a key."""
    key = n * PAGE + gl.arange(0, PAGE, layout=gl.SliceLayout(0, SCORES))
    seen = gl.expand_dims(key < end, 0)
    if CAUSAL:
        seen = seen & (gl.expand_dims(key, 0) <= gl.expand_dims(index, 1))
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def soften(scores, highest, total, unit, present, PART: gl.constexpr, DTYPE: gl.constexpr):
    """(weights, largest score, sum, fade of what was summed before) with one more page; present: whether it isn't null."""
    here = gl.where(present, gl.max(scores, 1) * unit, float("-inf"))
    higher = gl.maximum(highest, here)
    safe = gl.where(higher == float("-inf"), 0.0, higher)
    fade = gl.exp2(highest - safe)
    shift = gl.where(present, safe, float("inf"))
    weights = gl.exp2(scores * unit - gl.expand_dims(shift, 1))
    total = total * fade + gl.sum(weights, 1)
    return gl.convert_layout(weights.to(DTYPE), PART), higher, total, fade


@gluon.jit
def step_pages(
    k_smem, v_smem, k_full, k_empty, v_full, v_empty, q_smem, table_ptr, begin, stop, last, end, index,
    part, acc, highest, total, unit,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, PART: gl.constexpr, SUMS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Steps begin .. stop - 1: the scores of page last - 1 - i, and the product of the weights and values before it."""
    page = gl.load(table_ptr + gl.maximum(last - 1 - begin, 0))
    for i in range(begin, stop):
        slot = i % STAGES
        mbarrier.wait(k_full.index(slot), (i // STAGES) & 1)
        keys = k_smem.index(slot).reshape([PAGE, D])
        zeros = gl.zeros([64, PAGE], gl.float32, SCORES)
        product = warpgroup_mma(q_smem, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        before = (i - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        answer = warpgroup_mma(part, v_smem.index(before).reshape([PAGE, D]), acc, is_async=True)
        following = gl.load(table_ptr + gl.maximum(last - 2 - i, 0))
        scores = warpgroup_mma_wait(1, deps=[product])
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(slot), count=1)
        if MASKED:
            scores = mask_scores(scores, last - 1 - i, end, index, PAGE, CAUSAL, SCORES)
        next_part, highest, total, fade = soften(scores, highest, total, unit, page > 0, PART, DTYPE)
        acc, part = warpgroup_mma_wait(0, deps=[answer, part])
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, SUMS)), 1)
        part = next_part
        page = following
    return part, acc, highest, total


@gluon.jit
def attend_rows(
    q_ptr, out_ptr, sinks_ptr, k_smem, v_smem, q_all, k_full, k_empty, v_full, v_empty, cleared, table_ptr,
    first, count, context, before, begin_token, whole, last, end, i_kv, unit,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A group of warps: rows HALF * 64 .. HALF * 64 + 63 of the block."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PAGE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    PART: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    q_smem = q_all.index(HALF)

    o_m = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    token = begin_token + o_m // GROUP
    head = i_kv * GROUP + o_m % GROUP
    m_m = gl.expand_dims(token < count, 1)
    o_t = first + token
    p_q = q_ptr + gl.expand_dims(o_t * q_stride_t + head * q_stride_h, 1) + gl.expand_dims(o_d, 0)
    q_smem.store(gl.load(p_q, mask=m_m, other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    r_m = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    index = before + r_m // GROUP

    # The last page: nobody sees its rest, and what lies there may be NaN.
    page = gl.load(table_ptr + (last - 1))
    mbarrier.wait(k_full.index(0), 0)
    keys = k_smem.index(0).reshape([PAGE, D])
    scores = warpgroup_mma(q_smem, keys.permute((1, 0)), gl.zeros([64, PAGE], gl.float32, SCORES), use_acc=False)
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    scores = mask_scores(scores, last - 1, end, index, PAGE, CAUSAL, SCORES)
    highest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, D], gl.float32, SUMS)
    part, highest, total, fade = soften(scores, highest, total, unit, page > 0, PART, DTYPE)
    if last * PAGE > context:
        # A weight of zero times NaN is NaN, so values behind the context become zeros: by one group, and the other waits.
        if HALF == 0:
            mbarrier.wait(v_full.index(0), 0)
            v_rows = v_smem.index(0).reshape([PAGE, D])
            o_n = gl.arange(0, PAGE, layout=gl.SliceLayout(1, WIDE))
            values = v_rows.load(WIDE)
            m_n = gl.expand_dims((last - 1) * PAGE + o_n < context, 1)
            v_rows.store(gl.where(m_n, values, gl.zeros_like(values)))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(cleared, count=1)
        else:
            mbarrier.wait(cleared, 0)

    masked = gl.maximum(last - whole, 1)
    part, acc, highest, total = step_pages(
        k_smem, v_smem, k_full, k_empty, v_full, v_empty, q_smem, table_ptr, 1, masked, last, end, index,
        part, acc, highest, total, unit, True, CAUSAL, D, PAGE, STAGES, SCORES, PART, SUMS, DTYPE,
    )  # fmt: skip
    part, acc, highest, total = step_pages(
        k_smem, v_smem, k_full, k_empty, v_full, v_empty, q_smem, table_ptr, masked, last, last, end, index,
        part, acc, highest, total, unit, False, CAUSAL, D, PAGE, STAGES, SCORES, PART, SUMS, DTYPE,
    )  # fmt: skip
    slot = (last - 1) % STAGES
    mbarrier.wait(v_full.index(slot), ((last - 1) // STAGES) & 1)
    acc = warpgroup_mma(part, v_smem.index(slot).reshape([PAGE, D]), acc)

    if HAS_SINKS:
        sink = gl.load(sinks_ptr + i_kv * GROUP + r_m % GROUP).to(gl.float32) * LOG2_E
        higher = gl.maximum(highest, sink)
        fade = gl.exp2(highest - higher)
        total = total * fade + gl.exp2(sink - higher)
        acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, SUMS)), 1)
    share = 1.0 / gl.where(total > 0, total, 1.0)
    acc = acc * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, SUMS)), 1)
    # Through the place of the queries, so that rows are written whole.
    q_smem.store(acc.to(DTYPE))
    gl.thread_barrier()
    p_out = out_ptr + gl.expand_dims(o_t * out_stride_t + head * out_stride_h, 1) + gl.expand_dims(o_d, 0)
    gl.store(p_out, q_smem.load(WIDE), mask=m_m)


@gluon.jit(**ONE_VARIANT)
def prefill_kernel(
    q_ptr, k_desc, v_desc, pages_ptr, row_ptr, query_start_ptr, length_ptr, sinks_ptr, out_ptr, scale, requests,
    q_stride_t, q_stride_h, pages_stride_row, out_stride_t, out_stride_h,
    H: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BLOCK_R: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """A block of 128 rows of a request, against its whole context. k_desc, v_desc: of [pages, PAGE, KV, D]."""
    GROUP: gl.constexpr = H // KV
    TOKENS: gl.constexpr = 128 // GROUP
    DTYPE: gl.constexpr = k_desc.dtype
    i_kv = gl.program_id(0)
    # The last blocks of a request see the longest contexts: they start first.
    i_r, i_b = locate_block(query_start_ptr, requests, gl.num_programs(1) - 1 - gl.program_id(1), BLOCK_R, TOKENS)
    exists = i_r < requests
    i_r = gl.minimum(i_r, requests - 1)
    first = gl.load(query_start_ptr + i_r).to(gl.int64)
    count = (gl.load(query_start_ptr + i_r + 1).to(gl.int64) - first).to(gl.int32)
    count = gl.where(exists, count, 0)
    context = gl.load(length_ptr + i_r).to(gl.int32)
    table_ptr = pages_ptr + gl.load(row_ptr + i_r).to(gl.int64) * pages_stride_row
    before = context - count + i_b * TOKENS
    if CAUSAL:
        end = gl.minimum(context, before + TOKENS)
        whole = gl.minimum(context, before + 1) // PAGE
    else:
        end = context
        whole = context // PAGE
    # A block without tokens or without keys goes through one page, of which it sees nothing.
    end = gl.where(exists, end, 0)
    last = gl.maximum((end + PAGE - 1) // PAGE, 1)
    whole = gl.where(exists, gl.maximum(whole, 0), 0)

    ROWS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_all = gl.allocate_shared_memory(DTYPE, [2, 64, D], ROWS)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, PAGE, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, PAGE, 1, D], v_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(cleared, count=1)
    fence_async_shared()
    gl.thread_barrier()

    unit = scale * LOG2_E
    begin_token = i_b * TOKENS
    gl.warp_specialize(
        [
            (attend_rows, (q_ptr, out_ptr, sinks_ptr, k_smem, v_smem, q_all, k_full, k_empty, v_full, v_empty, cleared,
                           table_ptr, first, count, context, before, begin_token, whole, last, end, i_kv, unit,
                           q_stride_t, q_stride_h, out_stride_t, out_stride_h,
                           GROUP, D, PAGE, 0, STAGES, CAUSAL, HAS_SINKS, DTYPE)),
            (attend_rows, (q_ptr, out_ptr, sinks_ptr, k_smem, v_smem, q_all, k_full, k_empty, v_full, v_empty, cleared,
                           table_ptr, first, count, context, before, begin_token, whole, last, end, i_kv, unit,
                           q_stride_t, q_stride_h, out_stride_t, out_stride_h,
                           GROUP, D, PAGE, 1, STAGES, CAUSAL, HAS_SINKS, DTYPE)),
            (load_pages, (k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, table_ptr, last, i_kv, STAGES)),
        ],
        [WARPS, 1],
        [240, 24],
    )  # fmt: skip
