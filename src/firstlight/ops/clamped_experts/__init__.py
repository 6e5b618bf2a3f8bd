"""The expert MLPs of gpt-oss: biases, a clamped activation, and gate and up rows that alternate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from firstlight.ops.experts.assignment import sort_by_expert, weighted_sum
from firstlight.ops.op import Cost, Op, Shape
from firstlight.quant import Packed, Weight, dtype_name, nbytes, unpack

SLOPE = 1.702
"""Of the sigmoid in the activation."""


def body(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Weight,
    gate_up_bias: Tensor,
    down: Weight,
    down_bias: Tensor,
    *,
    limit: float,
    first_expert: int = 0,
) -> Tensor:
    """y[t] = sum_j weights[t, j] (down[e] h + down_bias[e]), h = (up + 1) gate sigmoid(1.702 gate), e = experts[t, j].

    gate and up are the even and odd rows of gate_up[e] x[t] + gate_up_bias[e]; gate is at most `limit`, up within +-limit.
    x: [T, H]. weights: [T, k] float. experts: [T, k] int. gate_up: [E, 2 I, H], down: [E, H, I], plain or packed; biases
    [E, 2 I] and [E, H]: this rank's experts, from number `first_expert`. Other experts, and -1, contribute nothing.
    Returns [T, H] in x.dtype. Products accumulate in float32 at least and are rounded to x.dtype, as is h; the weighted sum
    is in float32 and cast once. Raises NotImplementedError for a format that can't be unpacked.
    Source: the gpt-oss model file.
    """
    for weight in (gate_up, down):
        if isinstance(weight, Packed) and weight.format.dtype == "mxfp4":
            raise NotImplementedError(
                "clamped_experts: MXFP4 weights can be predicted, not run yet; give them in bfloat16"
            )
    assignment = sort_by_expert(experts, gate_up.shape[0], first_expert)
    top_k = experts.shape[1]
    result = x.new_zeros((experts.numel(), x.shape[1]))
    start = 0
    for expert, rows in enumerate(assignment.rows.tolist()):
        if rows:
            index = assignment.order[start : start + rows]
            both = linear(x[index // top_k], unpack(gate_up[expert], x.dtype), gate_up_bias[expert].to(x.dtype))
            gate, up = both[:, 0::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
            hidden = (up + 1) * gate * torch.sigmoid(SLOPE * gate)
            result[index] = linear(hidden, unpack(down[expert], x.dtype), down_bias[expert].to(x.dtype))
            start += rows
    return weighted_sum(result, weights, assignment)


def abstract(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """[T, H] in x.dtype."""
    return x.new_empty(x.shape)


def cost(
    shape: Shape,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Weight,
    gate_up_bias: Tensor,
    down: Weight,
    down_bias: Tensor,
    *,
    limit: float,
    first_expert: int = 0,
) -> Cost:
    """As for `experts`: weights and biases of the experts that are used once, tokens once in and out."""
    _, twice_intermediate, hidden = gate_up.shape
    top_k = experts.shape[1]
    activations = shape.tokens * hidden * x.element_size()
    held = nbytes(gate_up) + nbytes(down) + gate_up_bias.nbytes + down_bias.nbytes
    return Cost(
        flops={dtype_name(x.dtype): shape.tokens * top_k * 3 * twice_intermediate * hidden},
        read=shape.distinct_experts * held
        + activations
        + shape.tokens * top_k * (weights.element_size() + experts.element_size()),
        written=activations,
    )


clamped_experts = Op("clamped_experts", body, abstract=abstract, cost=cost)
