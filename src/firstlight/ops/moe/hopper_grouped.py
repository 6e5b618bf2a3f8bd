"""The whole mixture for many tokens on Hopper GPUs: the shared expert is one more choice of every token.

As `triton_grouped` for many tokens, but that the tokens are quantised after the choice, each to the rows of its experts. See
`experts.hopper_grouped` for the products.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from firstlight.ops.experts import hopper_grouped
from firstlight.ops.moe import triton_grouped
from firstlight.ops.op import Call
from firstlight.quant import Packed


def when(call: Call) -> str | None:
    """What `triton_grouped` takes in FP8 with a scale a block, a shared expert of the others' size; see `experts.hopper_grouped`."""
    x, _, gate_up, down, shared_gate_up, shared_down = call.args[:6]
    if reason := triton_grouped.when(call):
        return reason
    if reason := hopper_grouped.refusal(call, gate_up, down, x.shape[0] * call.kwargs["top_k"]):
        return reason
    if shared_down is None:
        return None
    if shared_down.shape[1] != down.shape[2]:
        return f"the shared expert's size is {shared_down.shape[1]}, the others' {down.shape[2]}"
    return hopper_grouped.cannot_transfer("shared_gate_up", shared_gate_up) or hopper_grouped.cannot_transfer(
        "shared_down", shared_down
    )


def workspace(call: Call) -> int:
    """What the experts take, the shared one among them, and the router's logits: bytes."""
    x, router, gate_up, down, shared_gate_up = call.args[:5]
    top_k = call.kwargs["top_k"]
    choice = x.shape[0] * (4 * router.shape[0] + 8 * (top_k + 1))
    return choice + hopper_grouped.row_bytes(x, gate_up, down, top_k, has_shared=shared_gate_up is not None)


def run(
    x: Tensor,
    router: Tensor,
    gate_up: Packed,
    down: Packed,
    shared_gate_up: Packed | None,
    shared_down: Packed | None,
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
    """The contract of `moe`. Tolerance: 4 % of the result's RMS, from the activations' quantisation; near ties of the router
    may fall otherwise."""
    from firstlight.ops.experts.hopper_grouped_kernels import multiplied
    from firstlight.ops.experts.triton_list_kernels import empty_lists
    from firstlight.ops.experts.triton_sum_kernel import summed
    from firstlight.ops.route import check_arguments, triton_fused_kernel

    check_arguments(router.shape[0], top_k, scoring, groups, top_groups)
    tokens, local_experts = x.shape[0], gate_up.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    shared = None if shared_gate_up is None or shared_down is None else (shared_gate_up, shared_down)
    gate = None if shared is None else shared_gate
    lists = empty_lists(tokens, local_experts, top_k + (shared is not None), x.device)
    lists.count.zero_()
    weights, chosen, share = triton_fused_kernel.choose_experts(
        functional.linear(x, router)[None], router.shape[0], top_k, scoring, renormalise, bias, scale, live, x.dtype,
        gate=None if gate is None else (x, gate), lists=lists, first_expert=first_expert, summed=False,
    )  # fmt: skip
    products, row = multiplied(x, chosen, lists, gate_up, down, top_k, first_expert, shared)
    return summed(products, weights, chosen, first_expert, local_experts, share if gate is not None else None, row)
