"""Residual add and norm in one launch: the sum is read once, where two kernels would write and read it again."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.rms_norm.triton_fused import refusal
from firstlight.ops.triton_support import cannot_emit
from firstlight.parallel import Group
from firstlight.quant import Emission, Weight


def when(call: Call) -> str | None:
    """One rank, two dimensions."""
    group = call.kwargs.get("group")
    if group is not None and group.size > 1:
        return "the sum over ranks isn't part of this kernel"
    x, residual, weight = call.args
    if x.dim() != 2 or residual.dtype != x.dtype:
        return f"x is {tuple(x.shape)} {x.dtype}, the residual {residual.dtype}; both must be [T, D] of one dtype"
    return refusal(call, x, weight) or cannot_emit(call, x.shape[1])


def run(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    zero_centred: bool = False,
    group: Group | None = None,
    emit: Emission | None = None,
) -> tuple[Weight, Tensor]:
    """The contract of `add_rms_norm`, on one rank."""
    from firstlight.ops.rms_norm import triton_fused_kernel as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual.stride(1) == 1 else residual.contiguous()
    return kernels.add_rms_norm(x, residual, weight, eps, zero_centred, emit)
