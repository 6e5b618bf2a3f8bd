"""The expert MLPs: each token through the few that it was routed to."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear, silu

from firstlight.ops.experts import hopper_grouped, torch_grouped, triton_few, triton_grouped
from firstlight.ops.experts.assignment import sort_by_expert, weighted_sum
from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.triton_support import provide_fp8
from firstlight.quant import Weight, dtype_name, nbytes, unpack


def body(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, *, first_expert: int = 0
) -> Tensor:
    """y[t] = sum_j weights[t, j] * down[e] (silu(gate) * up), with gate | up = gate_up[e] x[t] and e = experts[t, j].

    x: [T, H]. weights: [T, k] float. experts: [T, k] int. gate_up: [E, 2 I, H], gate rows first, and down: [E, H, I], plain
    or packed: this rank's experts, of which the first is number `first_expert`. Other experts, and -1, contribute nothing.
    Returns [T, H] in x.dtype. Packed weights are unpacked to x.dtype. Both products accumulate in float32 at least and are
    rounded to x.dtype; silu and the product with `up` are each rounded to x.dtype; the weighted sum is in float32 (float64
    if x is) and cast once.
    Source: Qwen3-MoE's experts in its model file, which round the partial sums to x.dtype as well.
    """
    assignment = sort_by_expert(experts, gate_up.shape[0], first_expert)
    top_k = experts.shape[1]
    result = x.new_zeros((experts.numel(), x.shape[1]))
    start = 0
    for expert, rows in enumerate(assignment.rows.tolist()):
        if rows:
            index = assignment.order[start : start + rows]
            gate, up = linear(x[index // top_k], unpack(gate_up[expert], x.dtype)).chunk(2, dim=-1)
            result[index] = linear(silu(gate) * up, unpack(down[expert], x.dtype))
            start += rows
    return weighted_sum(result, weights, assignment)


def abstract(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """[T, H] in x.dtype."""
    return x.new_empty(x.shape)


def cost(
    shape: Shape, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, *, first_expert: int = 0
) -> Cost:
    """Weights of the experts that are used once; tokens once in and out.

    Every assignment is counted here, whichever rank holds the expert: an upper bound where experts are spread over ranks.
    """
    _, twice_intermediate, hidden = gate_up.shape
    top_k = experts.shape[1]
    activations = shape.tokens * hidden * x.element_size()
    return Cost(
        flops={dtype_name(x.dtype): shape.tokens * top_k * 3 * twice_intermediate * hidden},
        read=shape.distinct_experts * (nbytes(gate_up) + nbytes(down))
        + activations
        + shape.tokens * top_k * (weights.element_size() + experts.element_size()),
        written=activations,
    )


experts = Op("experts", body, abstract=abstract, cost=cost)
experts.provide("torch_grouped", torch_grouped.run, when=torch_grouped.when, rank=3, workspace=torch_grouped.workspace)
experts.provide(
    "hopper_grouped", hopper_grouped.run, when=hopper_grouped.when, rank=5, workspace=hopper_grouped.workspace
)
for _name, _file, _rank in (("triton_few", triton_few, 4), ("triton_grouped", triton_grouped, 2)):
    provide_fp8(
        experts,
        _name,
        _file.run,
        when=_file.when,
        weights=("gate_up", "down"),
        rank=_rank,
        workspace=getattr(_file, "workspace", None),
    )
