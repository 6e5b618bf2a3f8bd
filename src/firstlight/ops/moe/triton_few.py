"""The whole mixture for a few tokens in four launches: router, choice with the shared expert's gate, and the two of experts.

The shared expert is one more choice of every token. See `experts.triton_few` for the kernels and their rounding.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from firstlight.ops.experts import triton_few
from firstlight.ops.linear.triton_skinny import weight_refusal
from firstlight.ops.op import Call
from firstlight.ops.route import triton_fused
from firstlight.quant import Packed, Weight, format_of

MOST_SKINNY = 2
"""Tokens up to which the router is dot products; for more of them the widened weights take too many registers."""


def when(call: Call) -> str | None:
    """What `experts.triton_few` takes, a plain router of the activations' dtype, a shared expert stored like the others."""
    x, router, gate_up, down = call.args[:4]
    if reason := triton_few.when(Call((x, router, router, gate_up, down), {}, call.bucket, call.hardware)):
        return reason
    if reason := triton_fused.when(Call((router.t(),), call.kwargs, call.bucket, call.hardware)):
        return reason
    if router.dtype != x.dtype:
        return f"the router is {router.dtype}, the activations {x.dtype}"
    return shared_refusal(call) or weight_refusal(router)


def shared_refusal(call: Call) -> str | None:
    """Why the shared expert of a call can't be one more choice of every token, or None."""
    gate_up, down, shared_gate_up, shared_down, shared_gate = call.args[2:]
    for name, weight, like in (("shared_gate_up", shared_gate_up, gate_up), ("shared_down", shared_down, down)):
        if weight is not None and format_of(weight) != format_of(like):
            return f"{name} is {format_of(weight)}, the other experts {format_of(like)}"
    if isinstance(shared_gate, Packed):
        return f"reads a plain shared_gate, not {shared_gate.format}"
    if shared_gate is not None and not shared_gate.is_contiguous():
        return f"reads a dense shared_gate, and its strides are {shared_gate.stride()}"
    return None


def run(
    x: Tensor,
    router: Tensor,
    gate_up: Weight,
    down: Weight,
    shared_gate_up: Weight | None,
    shared_down: Weight | None,
    shared_gate: Tensor | None,
    *,
    live: Tensor | None,
    top_k: int,
    renormalise: bool,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    first_expert: int = 0,
) -> Tensor:
    """The contract of `moe`. Tolerance: two roundings of x.dtype; near ties of the router may fall otherwise."""
    from firstlight.ops.experts import triton_few_kernels
    from firstlight.ops.linear import triton_skinny_kernels
    from firstlight.ops.route import check_arguments, triton_fused_kernel

    check_arguments(router.shape[0], top_k, scoring, groups, top_groups)
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.shape[0] <= MOST_SKINNY:
        logits = triton_skinny_kernels.product(x, router, None, x.dtype)
    else:
        logits = functional.linear(x, router)
    weights, chosen, share = triton_fused_kernel.choose_experts(
        logits[None], router.shape[0], top_k, scoring, renormalise, bias, scale, live, x.dtype,
        gate=None if shared_gate is None else (x, shared_gate),
    )  # fmt: skip
    shared = None if shared_gate_up is None or shared_down is None else (shared_gate_up, shared_down)
    return triton_few_kernels.experts(
        x, weights, chosen, gate_up, down, first_expert, shared, None if shared_gate is None else share
    )
