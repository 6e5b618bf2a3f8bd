"""torch's linear on plain weights: cuBLAS, hipBLASLt or oneDNN underneath."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.ops.op import Call
from firstlight.quant import Packed


def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def when(call: Call) -> str | None:
    x, weight = call.args[:2]
    bias = call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")
    wanted = call.kwargs.get("dtype")
    if isinstance(x, Packed):
        return f"the activations are {x.format}"
    if isinstance(weight, Packed):
        return f"the weight is {weight.format}"
    for name, dtype in (
        ("weight", weight.dtype),
        ("bias", bias.dtype if bias is not None else None),
        ("result", wanted),
    ):
        if dtype is not None and dtype != x.dtype:
            return f"the {name} is {dtype}, the activations {x.dtype}"
    return None
