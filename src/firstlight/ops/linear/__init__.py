"""y = x W^T + b: nearly all the bytes of a decode step and the operations of a prefill."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.ops.linear import (
    torch_block_fp8,
    torch_plain,
    torch_row_fp8,
    triton_block_fp8,
    triton_row_fp8,
    triton_skinny,
)
from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.triton_support import provide_fp8
from firstlight.quant import FLOAT8_BY_COLUMN, FLOAT8_BY_TOKEN, Packed, Weight, dtype_name, unpack


def body(x: Weight, weight: Weight, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """out = x @ weight^T + bias.

    x [T, K], plain or Packed (quantised activations); weight [N, K], plain or Packed; bias [N].
    dtype: of the result; x.dtype if None. A Packed x has none: TypeError if it isn't given then.
    Packed operands are unpacked in float32 and rounded to the result's dtype, as a plain weight of another dtype is; the
    product is accumulated in float32 at least and rounded once, the bias included.
    Returns [T, N]. Tolerance: sqrt(K) ulps of the accumulator, and one of the result.
    """
    kind = _result_dtype(x, dtype)
    return functional.linear(unpack(x, kind), unpack(weight, kind), None if bias is None else bias.to(kind))


def _result_dtype(x: Weight, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    if isinstance(x, Packed):
        raise TypeError(f"linear of {x.format} activations needs dtype=, the dtype of the result")
    return x.dtype


def abstract(x: Weight, weight: Weight, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=_result_dtype(x, dtype), device="meta")


def cost(
    shape: Shape, x: Weight, weight: Weight, bias: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Cost:
    """Weights once; multiplied in the dtype of the activations."""
    out = abstract(x, weight, dtype=dtype)
    operations = 2.0 * out.numel() * weight.shape[1]
    multiplied = x.format.dtype if isinstance(x, Packed) else dtype_name(x.dtype)
    read = x.nbytes + weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost({multiplied: operations}, read=read, written=out.nbytes)


linear = Op("linear", body, abstract=abstract, cost=cost)
linear.provide("torch", torch_plain.run, when=torch_plain.when)
linear.provide(
    "torch_block_fp8",
    torch_block_fp8.run,
    when=torch_block_fp8.when,
    rank=5,
    workspace=torch_block_fp8.workspace,
    wants=FLOAT8_BY_COLUMN,
)
provide_fp8(linear, "triton_skinny", triton_skinny.run, when=triton_skinny.when, weights=("weight",), rank=3)
provide_fp8(
    linear,
    "triton_block_fp8",
    triton_block_fp8.run,
    when=triton_block_fp8.when,
    weights=("weight",),
    rank=4,
    workspace=triton_block_fp8.workspace,
    wants=FLOAT8_BY_TOKEN,
)
linear.provide("torch_row_fp8", torch_row_fp8.run, when=torch_row_fp8.when, rank=5, workspace=torch_row_fp8.workspace)
provide_fp8(
    linear,
    "triton_row_fp8",
    triton_row_fp8.run,
    when=triton_row_fp8.when,
    weights=("weight",),
    rank=4,
    workspace=triton_row_fp8.workspace,
)
