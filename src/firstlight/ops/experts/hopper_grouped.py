"""Experts for many tokens on Hopper GPUs: rows sorted by expert, brought by TMA and a warp of its own.

Launches: clear the lists; fill them; cut them into tiles; number the rows; quantise each token to the rows of its experts;
gate and up with silu; down; weighted sum. Every grid has a static bound and programs without work end at once, so it can be
captured. Quantisation and rounding are those of `triton_grouped`.
"""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.experts import triton_grouped
from firstlight.ops.op import Call
from firstlight.ops.triton_support import cdiv, hopper_unavailable
from firstlight.quant import Packed, Weight

BLOCK = 128
TRANSFER = 16
"""Bytes: what TMA asks of addresses and strides to be a multiple of."""
LEAST_PAIRS = 64
"""Pairs an expert, on average. With fewer, tiles of 128 rows are mostly padding."""


def when(call: Call) -> str | None:
    """FP8 in blocks of 128 x 128, dense, for many pairs an expert, on sm_90."""
    experts, gate_up, down = call.args[2:]
    return triton_grouped.when(call) or refusal(call, gate_up, down, experts.numel())


def refusal(call: Call, gate_up: Weight, down: Weight, pairs: int) -> str | None:
    """Why not, where `triton_grouped` would serve; pairs: tokens x choices, without the shared expert's."""
    if reason := hopper_unavailable(call.hardware):
        return reason
    if not isinstance(gate_up, Packed) or not isinstance(down, Packed):
        return "the experts aren't FP8"
    if gate_up.format.by_row:
        return f"reads a scale a block, and the weights are {gate_up.format}"
    if pairs < LEAST_PAIRS * gate_up.shape[0]:
        return f"serves {LEAST_PAIRS} pairs an expert or more, not {pairs} for {gate_up.shape[0]}"
    return cannot_transfer("gate_up", gate_up) or cannot_transfer("down", down)


def cannot_transfer(name: str, weight: Packed) -> str | None:
    """Why TMA can't read a weight as one matrix, or None."""
    data = weight.parts["data"]
    if data.is_contiguous() and data.shape[-1] % BLOCK == 0 and data.data_ptr() % TRANSFER == 0:
        return None
    return f"reads dense weights by TMA, and {name} has strides {data.stride()} at {data.data_ptr():#x}"


def workspace(call: Call) -> int:
    """Lists of pairs, and sorted rows: quantised tokens, what lies between the products, the products; bytes."""
    x, _, experts, gate_up, down = call.args
    return row_bytes(x, gate_up, down, experts.shape[1], has_shared=False)


def most_tiles(tokens: int, top_k: int, local_experts: int, *, has_shared: bool) -> int:
    """Tiles of rows that scratch memory is for: every pair's, and what the experts' last tiles leave open."""
    pairs = tokens * top_k
    return min(pairs, cdiv(pairs, BLOCK) + local_experts) + has_shared * cdiv(tokens, BLOCK)


def row_bytes(x: Tensor, gate_up: Weight, down: Weight, top_k: int, *, has_shared: bool) -> int:
    """The same with a shared expert. Quantised tokens have the place of the products."""
    tokens, hidden = x.shape
    experts, _, size = down.shape
    pairs = tokens * top_k
    tiles = most_tiles(tokens, top_k, experts, has_shared=has_shared)
    rows = tiles * BLOCK * (hidden * x.element_size() + size + 4 * (hidden + size) // BLOCK)
    return rows + tiles * 12 + 4 * experts * tokens + 4 * (pairs + tokens)


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Packed, down: Packed, *, first_expert: int = 0) -> Tensor:
    """The contract of `experts`. Tolerance: 4 % of the result's RMS, from the activations' quantisation."""
    from firstlight.ops.experts.hopper_grouped_kernels import multiplied
    from firstlight.ops.experts.triton_list_kernels import listed
    from firstlight.ops.experts.triton_sum_kernel import summed

    x, weights, experts = x if x.stride(1) == 1 else x.contiguous(), weights.contiguous(), experts.contiguous()
    lists = listed(experts, first_expert, gate_up.shape[0])
    products, row = multiplied(x, experts, lists, gate_up, down, experts.shape[1], first_expert)
    return summed(products, weights, experts, first_expert, gate_up.shape[0], None, row)
