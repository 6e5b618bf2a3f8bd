"""A mixture-of-experts MLP: router, routed experts, and the expert that every token goes through."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from firstlight.ops.add import add
from firstlight.ops.experts import experts
from firstlight.ops.linear import linear
from firstlight.ops.moe import hopper_grouped, triton_few, triton_grouped
from firstlight.ops.op import Op
from firstlight.ops.route import route
from firstlight.ops.sigmoid_mul import sigmoid_mul
from firstlight.ops.silu_mul import silu_mul
from firstlight.ops.triton_support import provide_fp8
from firstlight.quant import Weight, format_of


def body(
    parts: SimpleNamespace,
    x: Tensor,
    router: Weight,
    gate_up: Weight,
    down: Weight,
    shared_gate_up: Weight | None,
    shared_down: Weight | None,
    shared_gate: Weight | None,
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
    """y = sum over the chosen experts of weight * expert(x), + shared_expert(x) * sigmoid(shared_gate x).

    x: [T, H]. router: [all experts, H]; logits are computed in its dtype. gate_up: [E, 2 I, H], down: [E, H, I]: this rank's
    experts, from `first_expert` on. shared_gate_up: [2 J, H] and shared_down: [H, J], or None without a shared expert;
    shared_gate: [1, H], or None where the shared expert counts in full. Matrices may be packed, the router
    in a layout of its provider's only.
    live, top_k, renormalise, scoring, bias, groups, top_groups, scale: as in `route`.
    Returns [T, H] in x.dtype. With the intermediate dimensions split over ranks (I, J), or the experts (E), the ranks'
    results add up to the whole.
    Source: Qwen3-MoE, Qwen3.5-MoE (gated shared expert) and DeepSeek-V3 (ungated) in their model files.
    """
    logits = parts.router(x.to(format_of(router).torch_dtype), router)
    weights, chosen = parts.route(
        logits,
        top_k=top_k,
        scoring=scoring,
        renormalise=renormalise,
        bias=bias,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
        live=live,
        dtype=x.dtype,
    )
    routed = parts.experts(x, weights, chosen, gate_up, down, first_expert=first_expert)
    if shared_gate_up is None:
        return routed
    shared = parts.shared_down(parts.silu_mul(parts.shared_gate_up(x, shared_gate_up)), shared_down)
    if shared_gate is not None:
        shared = parts.sigmoid_mul(shared, parts.shared_gate(x, shared_gate))
    return parts.add(routed, shared)


def abstract(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """[T, H] in x.dtype."""
    return x.new_empty(x.shape)


moe = Op(
    "moe",
    body,
    abstract=abstract,
    parts={
        "router": linear,
        "route": route,
        "experts": experts,
        "shared_gate_up": linear,
        "silu_mul": silu_mul,
        "shared_down": linear,
        "shared_gate": linear,
        "sigmoid_mul": sigmoid_mul,
        "add": add,
    },
)
moe.provide("hopper_grouped", hopper_grouped.run, when=hopper_grouped.when, rank=4, workspace=hopper_grouped.workspace)
WEIGHTS = ("gate_up", "down", "shared_gate_up", "shared_down")
provide_fp8(moe, "triton_few", triton_few.run, when=triton_few.when, weights=WEIGHTS, rank=2)
provide_fp8(
    moe,
    "triton_grouped",
    triton_grouped.run,
    when=triton_grouped.when,
    weights=WEIGHTS,
    rank=3,
    workspace=triton_grouped.workspace,
)
