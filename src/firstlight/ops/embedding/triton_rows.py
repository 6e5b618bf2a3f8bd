"""Embedding look-up in one launch, ids of other ranks included: torch's body takes five."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable
from firstlight.quant import Packed


def when(call: Call) -> str | None:
    """Plain tables."""
    if reason := unavailable(call.hardware):
        return reason
    weight = call.args[1]
    return f"reads plain tables, and this is {weight.format}" if isinstance(weight, Packed) else None


def run(ids: Tensor, weight: Tensor, *, start: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """The contract of `embedding`."""
    from firstlight.ops.embedding import triton_rows_kernel as kernels

    return kernels.rows(weight if weight.stride(1) == 1 else weight.contiguous(), ids, start, dtype or weight.dtype)
