"""torch's own RMS norm: one kernel. It rounds once, so it keeps the contract only where nothing is rounded on the way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.ops.op import Call


def run(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool = False) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def when(call: Call) -> str | None:
    if call.kwargs.get("zero_centred"):
        return "the weight is zero-centred (1 + weight), which torch's norm doesn't know"
    if call.dtype not in (torch.float32, torch.float64):
        return f"torch rounds to {call.dtype} once, this norm before the weight and after it"
    if call.args[1].dtype != call.dtype:
        return f"the weight is {call.args[1].dtype}, the input {call.dtype}"
    return None
