"""The kernel of `triton_fused`."""

from __future__ import annotations

import triton.language as tl

from firstlight.ops.triton_launch import kernel

BLOCK = 64
"""Tokens, and rows, of one program."""


@kernel
def step_inputs_kernel(
    rows_ptr,
    query_start_ptr,
    length_ptr,
    last_token_ptr,
    position_delta_ptr,
    pages_ptr,
    prompt_ptr,
    ids_ptr,
    positions_ptr,
    new_length_ptr,
    slot_ptr,
    requests,
    tokens,
    decodes,
    pages_stride,
    columns,
    page_size,
    POSITION_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # A row's length with this step.
    m_r = o < requests
    row = tl.load(rows_ptr + o, mask=m_r, other=0).to(tl.int64)
    before = tl.load(length_ptr + row, mask=m_r & (row > 0), other=0)
    count = tl.load(query_start_ptr + o + 1, mask=m_r, other=0) - tl.load(query_start_ptr + o, mask=m_r, other=0)
    tl.store(new_length_ptr + o, (before + count).to(tl.int32), mask=m_r)

    # The request of a token: how many requests end at or before it.
    m_t = o < tokens
    o_r = tl.arange(0, BLOCK_R)
    ends = tl.load(query_start_ptr + 1 + o_r, mask=o_r < requests, other=2147483647)
    request = tl.sum((ends[None, :] <= o[:, None]).to(tl.int32), 1)
    request = tl.minimum(request, requests - 1)
    row = tl.load(rows_ptr + request, mask=m_t, other=0).to(tl.int64)
    real = m_t & (row > 0)
    row = tl.maximum(row, 0)
    before = tl.load(length_ptr + row, mask=real, other=0)
    index = before + o - tl.load(query_start_ptr + request, mask=m_t, other=0)
    decode = o < decodes
    last = tl.load(last_token_ptr + row, mask=m_t & decode, other=0)
    given = tl.load(prompt_ptr + (o - decodes), mask=m_t & (o >= decodes), other=0).to(tl.int64)
    tl.store(ids_ptr + o, tl.where(decode, last, given), mask=m_t)
    position = index + tl.load(position_delta_ptr + row, mask=real, other=0)
    for i in tl.static_range(POSITION_ROWS):
        tl.store(positions_ptr + i * tokens + o, position, mask=m_t)
    column = tl.minimum(index // page_size, columns - 1)
    # Padding may lie past the last row's context, where `column` names a page in use: it goes to page 0.
    inside = m_t & (o < tl.load(query_start_ptr + requests))
    page = tl.load(pages_ptr + row * pages_stride + column, mask=inside, other=0).to(tl.int64)
    tl.store(slot_ptr + o, tl.maximum(page, 0) * page_size + index % page_size, mask=m_t)
