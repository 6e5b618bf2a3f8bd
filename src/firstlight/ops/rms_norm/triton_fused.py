"""RMS norm in one launch, in either rounding; rows of up to two strides, so a view of heads is read where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import cannot_emit, unavailable
from firstlight.quant import Emission, Weight

MOST_COLUMNS = 16384
SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)


def refusal(call: Call, *tensors: Tensor) -> str | None:
    """Why kernels that hold a whole row of these tensors can't serve a call."""
    if reason := unavailable(call.hardware):
        return reason
    for tensor in tensors:
        if tensor.dtype not in SUPPORTED:
            return f"serves {', '.join(map(str, SUPPORTED))}, not {tensor.dtype}"
    columns = call.args[0].shape[-1]
    return f"holds rows of up to {MOST_COLUMNS}, not {columns}" if columns > MOST_COLUMNS else None


def when(call: Call) -> str | None:
    """Two or three dimensions."""
    x, weight = call.args
    if x.dim() not in (2, 3):
        return f"x has {x.dim()} dimensions, the kernel takes 2 or 3"
    return refusal(call, x, weight) or cannot_emit(call, x.shape[-1], x.dim())


def run(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool = False, emit: Emission | None = None) -> Weight:
    """The contract of `rms_norm`."""
    from firstlight.ops.rms_norm import triton_fused_kernel as kernels

    return kernels.rms_norm(x if x.stride(-1) == 1 else x.contiguous(), weight, eps, zero_centred, emit)
