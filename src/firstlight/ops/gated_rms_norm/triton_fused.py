"""Norm and output gate in one launch, several heads a program."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.rms_norm.triton_fused import refusal


def when(call: Call) -> str | None:
    """Two or three dimensions."""
    x, gate, weight = call.args
    if x.dim() not in (2, 3):
        return f"x has {x.dim()} dimensions, the kernel takes 2 or 3"
    return refusal(call, x, gate, weight)


def run(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """The contract of `gated_rms_norm`."""
    from firstlight.ops.rms_norm import triton_fused_kernel as kernels

    x = x if x.stride(-1) == 1 else x.contiguous()
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    return kernels.gated_rms_norm(x, gate, weight, eps)
