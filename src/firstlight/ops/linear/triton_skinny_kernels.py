"""Kernels of `triton_skinny`: y [T, N] = x [T, K] W^T, W [N, K] row-major, T small."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.quant import Packed, Weight

ROW_BYTES = 2048
"""Bytes of a row that a program of one token reads at once: 16 for each lane of four warps."""


@triton.jit
def scaled_input(
    x_ptr, scale_ptr, i_k, K, BLOCK_K: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_SCALE: tl.constexpr
):  # fmt: skip
    """x[i_k : i_k + BLOCK_K] in float32, times the scales of a row of blocks: one multiply here saves one a row."""
    RUN: tl.constexpr = min(BLOCK_K, SCALE_COLUMNS)
    o_k = i_k + (tl.arange(0, BLOCK_K // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    b_x = tl.load(x_ptr + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    if HAS_SCALE:
        o_k = i_k + tl.arange(0, BLOCK_K // RUN) * RUN
        b_x *= tl.load(scale_ptr + o_k // SCALE_COLUMNS, mask=o_k < K, other=0.0).to(tl.float32)[:, None]
    return b_x.reshape(BLOCK_K)


@triton.jit
def one_token(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr,
    N, K, w_stride_n, scale_stride_n,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N rows, which share their scales: BLOCK_N divides SCALE_ROWS."""
    i_n = tl.program_id(0).to(tl.int64)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_y = tl.zeros([BLOCK_N], dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_w = tl.load(w_ptr + o_n[:, None] * w_stride_n + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_x = scaled_input(x_ptr, scale_ptr + i_n * BLOCK_N // SCALE_ROWS * scale_stride_n, i_k, K,
                           BLOCK_K, SCALE_COLUMNS, HAS_SCALE)  # fmt: skip
        b_y += tl.sum(b_w.to(tl.float32) * b_x[None, :], axis=1)
    if HAS_BIAS:
        b_y += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + o_n, b_y.to(y_ptr.dtype.element_ty), mask=m_n)


@triton.jit
def few_tokens(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr,
    T, N, K, x_stride_t, w_stride_n, scale_stride_n, y_stride_t,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N rows for all tokens; a tile of BLOCK_N x BLOCK_K has one scale."""
    i_n = tl.program_id(0).to(tl.int64)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_t = tl.arange(0, BLOCK_T)
    m_n, m_t = o_n < N, o_t < T
    b_acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_w = tl.load(w_ptr + o_n[:, None] * w_stride_n + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_x = tl.load(x_ptr + o_t[None, :] * x_stride_t + o_k[:, None], mask=m_t[None, :] & m_k[:, None], other=0.0)
        b_part = tl.dot(b_w.to(b_x.dtype), b_x, input_precision=PRECISION)
        if HAS_SCALE:
            p_scale = scale_ptr + i_n * BLOCK_N // SCALE_ROWS * scale_stride_n + i_k // SCALE_COLUMNS
            b_acc += b_part * tl.load(p_scale).to(tl.float32)
        else:
            b_acc += b_part
    if HAS_BIAS:
        b_acc += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    p_y = y_ptr + o_t[None, :] * y_stride_t + o_n[:, None]
    tl.store(p_y, b_acc.to(y_ptr.dtype.element_ty), mask=m_n[:, None] & m_t[None, :])


def divisor(size: int, limit: int) -> int:
    """The largest power of two that divides `size`, up to `limit`."""
    return min(size & -size, limit)


def product(x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype, **tuning: int) -> Tensor:
    """x [T, K] with T <= 16, columns adjacent. tuning: block_n, block_k, num_warps, num_stages in place of the defaults."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    y = torch.empty((tokens, rows), dtype=dtype, device=x.device)
    if isinstance(weight, Packed):
        assert weight.format.block is not None
        data, scale, block = weight.parts["data"], weight.parts["scale"], weight.format.block
    else:
        data, scale, block = weight, weight, (128, 128)
    packed = isinstance(weight, Packed)
    shared = {
        "w_ptr": data, "scale_ptr": scale, "bias_ptr": x if bias is None else bias, "y_ptr": y, "x_ptr": x,
        "N": rows, "K": columns, "w_stride_n": data.stride(0), "scale_stride_n": scale.stride(0),
        "SCALE_ROWS": block[0], "SCALE_COLUMNS": block[1], "HAS_SCALE": packed, "HAS_BIAS": bias is not None,
    }  # fmt: skip
    if tokens == 1:
        block_k = tuning.get("block_k", min(triton.next_power_of_2(columns), ROW_BYTES // data.element_size()))
        block_n = tuning.get("block_n", 8 if rows >= 4096 else 4 if rows >= 1024 else 2)
        block_n = divisor(block[0], block_n)
        one_token[(triton.cdiv(rows, block_n),)](
            **shared, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=tuning.get("num_warps", 4)
        )
        return y
    block_n = tuning.get("block_n", 64 if rows >= 8192 else 32 if rows >= 4096 else 16)
    block_k = tuning.get("block_k", 128)
    if packed:
        block_n, block_k = divisor(block[0], block_n), divisor(block[1], block_k)
    few_tokens[(triton.cdiv(rows, block_n),)](
        **shared, T=tokens, x_stride_t=x.stride(0), y_stride_t=rows, BLOCK_T=16, BLOCK_N=block_n, BLOCK_K=block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tuning.get("num_warps", 4), num_stages=tuning.get("num_stages", 4),
    )  # fmt: skip
    return y
