"""One token a request: each window moves by one column, without the bookkeeping of ragged requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstlight.ops.causal_conv.activation import activate
from firstlight.ops.op import Call
from firstlight.ops.precision import wide_dtype
from firstlight.ops.slots import read_slots, write_slots


def when(call: Call) -> str | None:
    """Decode steps that keep plain states."""
    x, state_in, state_out = call.args[0], call.args[4], call.args[5]
    if call.kwargs["max_query"] != 1 or len(x) != len(state_in):
        return "serves steps with one token a request"
    if call.kwargs.get("log") is not None or state_out.dim() != 1:
        return "writes the window after the step only"
    return None


def workspace(call: Call) -> int:
    """Windows with the new column, widened, their products with the taps, and the windows after: bytes."""
    x, weight = call.args[0], call.args[1]
    return x.shape[0] * weight.shape[0] * weight.shape[1] * (12 + x.element_size())


def run(
    x: Tensor,
    weight: Tensor,
    pool: Tensor,
    query_start: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    exports: Tensor,
    *,
    max_query: int,
    activation: str = "silu",
    **_: Any,
) -> Tensor:
    """The contract of `causal_conv` for one token (or none) a request."""
    dtype = wide_dtype(x.dtype)
    windows = read_slots(pool, state_in)
    columns = torch.cat([windows.to(dtype), x.unsqueeze(-1).to(dtype)], dim=-1)
    total = (columns * weight.to(dtype)).sum(-1)
    has_token = (query_start[1:] > query_start[:-1]).view(-1, 1, 1)
    after = torch.where(has_token, columns[..., 1:], columns[..., :-1])
    if len(exports):
        request, offset, slot = exports.long().unbind(1)
        request = request.clamp(0, len(x) - 1)
        write_slots(pool, torch.where(offset > 0, slot, 0), after, request)
        write_slots(pool, torch.where(offset > 0, 0, slot), windows, request)
    write_slots(pool, state_out, after)
    return activate(total, activation).to(x.dtype)
