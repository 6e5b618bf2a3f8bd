"""torch's own layer norm: one kernel, float32 inside and rounded once, as the contract says."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from firstlight.ops.op import Call


def run(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def when(call: Call) -> str | None:
    for name, argument in zip(("weight", "bias"), call.args[1:3], strict=True):
        if argument.dtype != call.dtype:
            return f"the {name} is {argument.dtype}, the input {call.dtype}"
    return None
