"""Kernel of `triton_rows`, and of `gather_rows`'s."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firstlight.ops.triton_launch import dependent_launch, kernel, let_next_begin, wait_for_earlier
from firstlight.ops.triton_support import cdiv, power_of_two

BLOCK = 1024


@kernel
def copy_rows(
    table_ptr, index_ptr, y_ptr, rows, D, start, table_stride, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y [N, D] = table[index - start], or zeros where that is no row.

    As an embedding it is the first kernel of a step that is followed early. It waits first: kernels behind it may read what was
    written before the step (slots, states) before they wait themselves.
    """
    wait_for_earlier(PDL)
    let_next_begin(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    row = tl.load(index_ptr + i_n).to(tl.int64) - start
    held = (row >= 0) & (row < rows)
    b_y = tl.load(table_ptr + row * table_stride + o_d, mask=m_d & held, other=0)
    tl.store(y_ptr + i_n * D + o_d, b_y.to(y_ptr.dtype.element_ty), mask=m_d)


def rows(table: Tensor, index: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """table [V, D], columns adjacent; index [N] int32 or int64 -> [N, D]."""
    count, size = index.shape[0], table.shape[1]
    y = torch.empty((count, size), dtype=dtype, device=table.device)
    block = min(BLOCK, power_of_two(size))
    if count:
        copy_rows[(count, cdiv(size, block))](
            table, index.contiguous(), y, table.shape[0], size, start, table.stride(0), BLOCK_D=block,
            **dependent_launch(table),
        )  # fmt: skip
    return y
