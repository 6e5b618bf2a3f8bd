"""The kernel of `triton_fused`."""

from __future__ import annotations

import triton.language as tl

from firstlight.ops.triton_launch import kernel

BLOCK_T = 16
"""Tokens of one program."""


@kernel
def rope_angles_kernel(
    positions_ptr,
    inv_freq_ptr,
    out_ptr,
    factor,
    tokens,
    stride_row,
    stride_t,
    height,
    width,
    F: tl.constexpr,
    SEVERAL: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    o_t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    o_f = tl.arange(0, BLOCK_F)
    m_t, m_f = o_t < tokens, o_f < F
    m = m_t[:, None] & m_f[None, :]
    axis = tl.zeros([BLOCK_F], tl.int32)
    if SEVERAL:
        # Frequency 3 i + 1 turns with the height, 3 i + 2 with the width, each while i is below its section.
        turn = o_f // 3
        axis = tl.where((o_f % 3 == 1) & (turn < height), 1, tl.where((o_f % 3 == 2) & (turn < width), 2, 0))
    position = tl.load(
        positions_ptr + axis[None, :].to(tl.int64) * stride_row + o_t[:, None] * stride_t, mask=m, other=0
    )
    angle = position.to(tl.float32) * tl.load(inv_freq_ptr + o_f, mask=m_f, other=0.0)[None, :]
    p_out = out_ptr + o_t[:, None] * (2 * F) + o_f[None, :]
    tl.store(p_out, tl.cos(angle) * factor, mask=m)
    tl.store(p_out + F, tl.sin(angle) * factor, mask=m)
