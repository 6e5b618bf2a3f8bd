"""The output gate in one launch."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.rms_norm.triton_fused import SUPPORTED
from firstlight.ops.triton_support import cannot_emit, unavailable
from firstlight.quant import Emission, Weight


def when(call: Call) -> str | None:
    """Rows of floats."""
    x, gate = call.args
    if reason := unavailable(call.hardware):
        return reason
    if x.dim() != 2 or x.dtype not in SUPPORTED or gate.dtype not in SUPPORTED:
        return f"serves rows of floats, not {x.dim()} dimensions of {x.dtype} and {gate.dtype}"
    return cannot_emit(call, x.shape[1])


def run(x: Tensor, gate: Tensor, *, emit: Emission | None = None) -> Weight:
    """The contract of `sigmoid_mul`."""
    from firstlight.ops.silu_mul import triton_fused_kernel as kernels

    return kernels.sigmoid_mul(x if x.stride(1) == 1 else x.contiguous(), gate, emit)
