"""The kernel of `triton_fused`."""

from __future__ import annotations

import triton.language as tl

from firstlight.ops.triton_launch import kernel

BLOCK = 128
"""Rows of one program."""


@kernel
def advance_rows_kernel(
    length_ptr,
    last_token_ptr,
    rows_ptr,
    new_length_ptr,
    sampling_ptr,
    drawn_ptr,
    requests,
    samples,
    BLOCK: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + o, mask=o < requests, other=0).to(tl.int64)
    length = tl.load(new_length_ptr + o, mask=o < requests, other=0).to(tl.int64)
    tl.store(length_ptr + row, length, mask=row > 0)
    which = tl.load(sampling_ptr + o, mask=o < samples, other=0)
    row = tl.load(rows_ptr + which, mask=o < samples, other=0).to(tl.int64)
    drawn = tl.load(drawn_ptr + o, mask=o < samples, other=0)
    tl.store(last_token_ptr + row, drawn, mask=row > 0)
