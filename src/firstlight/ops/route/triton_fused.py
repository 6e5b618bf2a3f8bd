"""The router's choice in one launch: scores, bias, top-k and renormalisation, a program a token."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable

MOST_EXPERTS = 4096


def when(call: Call) -> str | None:
    """Up to 4,096 experts in one group."""
    if reason := unavailable(call.hardware):
        return reason
    if call.kwargs.get("groups", 1) > 1:
        return "knows no groups of experts"
    if call.args[0].shape[1] > MOST_EXPERTS:
        return f"holds {MOST_EXPERTS} experts, not {call.args[0].shape[1]}"
    return f"computes in float32, and the logits are {call.dtype}" if call.dtype == torch.float64 else None


def run(
    logits: Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalise: bool,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    live: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The contract of `route`. Tolerance: 1e-6 relative and the result's rounding; near ties may fall otherwise."""
    from firstlight.ops.route import check_arguments
    from firstlight.ops.route import triton_fused_kernel as kernels

    check_arguments(logits.shape[1], top_k, scoring, groups, top_groups)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return kernels.choose_experts(
        logits[None], logits.shape[1], top_k, scoring, renormalise, bias, scale, live, dtype or logits.dtype
    )[:2]
