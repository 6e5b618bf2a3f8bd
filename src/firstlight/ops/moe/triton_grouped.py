"""The whole mixture in five launches up to 256 tokens: router, choice, gate and up, down, weighted sum.

The router's kernel also quantises x and the choice makes the lists of each expert, so nothing is sorted; the shared expert
is one more choice of every token and goes through the kernels of the others. For more tokens the router's product is
torch's, and for many the lists are cut into tiles by a launch of its own. See `experts.triton_grouped` for the products and their rounding.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from firstlight.ops.experts import triton_grouped
from firstlight.ops.moe.triton_few import shared_refusal
from firstlight.ops.op import Call
from firstlight.ops.route import triton_fused
from firstlight.quant import Packed, Weight

MOST_TOGETHER = 256
"""Tokens up to which one kernel multiplies with the router, quantises and clears the lists."""
LEAST_TOKENS = 3
"""Fewer are quicker one expert a token, as dot products."""


def when(call: Call) -> str | None:
    """FP8 experts as `experts.triton_grouped` takes them, a plain router, a shared expert stored like the others."""
    x, router, gate_up, down = call.args[:4]
    if reason := triton_grouped.when(Call((x, router, router, gate_up, down), {}, call.bucket, call.hardware)):
        return reason
    if reason := triton_fused.when(Call((router.t(),), call.kwargs, call.bucket, call.hardware)):
        return reason
    if x.shape[0] < LEAST_TOKENS:
        return f"serves {LEAST_TOKENS} tokens or more, not {x.shape[0]}"
    if not isinstance(gate_up, Packed):
        return "the experts aren't FP8"
    if router.dtype != x.dtype:
        return f"the router is {router.dtype}, the activations {x.dtype}"
    shared_down = call.args[5]
    if shared_down is not None and shared_down.shape[1] % triton_grouped.BLOCK:
        return f"the shared expert's size must be a multiple of {triton_grouped.BLOCK}, not {shared_down.shape[1]}"
    return shared_refusal(call)


def workspace(call: Call) -> int:
    """What the experts take, the shared one among them, and the router's sums: bytes."""
    x, router, gate_up, down, shared_gate_up, shared_down = call.args[:6]
    inner = max(down.shape[2], 0 if shared_down is None else shared_down.shape[1])
    slots = call.kwargs["top_k"] + (shared_gate_up is not None)
    tokens, parts = x.shape[0], -(-x.shape[1] // 256) if x.shape[0] <= MOST_TOGETHER else 1
    choice = tokens * (parts * 4 * (router.shape[0] + 16) + slots * 8)
    return triton_grouped.pair_bytes(x, gate_up, inner, slots) + choice


def run(
    x: Tensor,
    router: Tensor,
    gate_up: Packed,
    down: Packed,
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
    **tuning: int,
) -> Tensor:
    """The contract of `moe`. Tolerance: 4 % of the result's RMS, from the activations' quantisation; near ties of the router
    may fall otherwise. tuning: entries of the experts' table to replace."""
    from firstlight.ops.experts import triton_grouped_kernels as kernels
    from firstlight.ops.experts.triton_list_kernels import empty_lists
    from firstlight.ops.experts.triton_sum_kernel import summed
    from firstlight.ops.linear.triton_quantise import quantised
    from firstlight.ops.moe.triton_router_kernel import router_parts
    from firstlight.ops.route import check_arguments, triton_fused_kernel

    check_arguments(router.shape[0], top_k, scoring, groups, top_groups)
    tokens, local_experts = x.shape[0], gate_up.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    shape = kernels.tile_shape(gate_up, tokens * top_k, tuning)
    shared = None if shared_gate_up is None or shared_down is None else (shared_gate_up, shared_down)
    lists = empty_lists(tokens, local_experts, top_k + (shared is not None), x.device)
    gate = None if shared is None else shared_gate
    together = tokens <= MOST_TOGETHER
    if together:
        logits, source = router_parts(x, router, gate, gate_up.parts["data"].dtype, lists)
    else:
        lists.count.zero_()
        logits, source = functional.linear(x, router)[None], quantised(x, gate_up.parts["data"].dtype)
    weights, chosen, share = triton_fused_kernel.choose_experts(
        logits, router.shape[0], top_k, scoring, renormalise, bias, scale, live, x.dtype,
        gate=None if gate is None else (x, gate), lists=lists, first_expert=first_expert, summed=together,
    )  # fmt: skip
    products = kernels.multiplied(source, lists, shape, gate_up, down, x.dtype, top_k, shared)
    return summed(products, weights, chosen, first_expert, local_experts, share if gate is not None else None)
