"""The last kernel of an expert layer: a token's products, weighted."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import cdiv, power_of_two


@kernel
def weighted_sum(
    pairs_ptr, row_ptr, experts_ptr, weights_ptr, share_ptr, y_ptr, H, first_expert, local_experts,
    SLOTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, HAS_SHARE: tl.constexpr,
    HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, H] = sum of a token's products [SLOTS, H] by their weights, in float32 and in the order of the choices.

    The shared expert's product is the last; its weight is share [T], or 1. With HAS_ROWS, pair i's product stands at row[i].
    """
    wait_for_inputs(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    b_acc = tl.zeros([BLOCK_H], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + i_t * TOP_K + choice) - first_expert
        local = (expert >= 0) & (expert < local_experts)
        weight = tl.load(weights_ptr + i_t * TOP_K + choice, mask=local, other=0.0).to(tl.float32)
        i_pair = i_t * SLOTS + choice
        if HAS_ROWS:
            i_pair = tl.load(row_ptr + i_pair, mask=local, other=0).to(tl.int64)
        p_pair = pairs_ptr + i_pair * H + o_h
        b_acc += weight * tl.load(p_pair, mask=m_h & local, other=0.0).to(tl.float32)
    if SLOTS > TOP_K:
        i_pair = i_t * SLOTS + TOP_K
        if HAS_ROWS:
            i_pair = tl.load(row_ptr + i_pair).to(tl.int64)
        b_pair = tl.load(pairs_ptr + i_pair * H + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_acc += b_pair * tl.load(share_ptr + i_t) if HAS_SHARE else b_pair
    tl.store(y_ptr + i_t * H + o_h, b_acc.to(y_ptr.dtype.element_ty), mask=m_h)


def summed(
    products: Tensor, weights: Tensor, chosen: Tensor, first_expert: int, local_experts: int, share: Tensor | None,
    row: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """products of pairs [T * slots, H], weights and chosen [T, k], share [T] float32 -> [T, H].

    row [T * slots]: where pairs' products stand in `products`, which may then be longer.
    """
    tokens, top_k = chosen.shape
    hidden_size, slots = products.shape[1], (products.shape[0] if row is None else row.shape[0]) // tokens
    y = torch.empty((tokens, hidden_size), dtype=products.dtype, device=products.device)
    block_h = min(power_of_two(hidden_size), 1024)
    weighted_sum[(tokens, cdiv(hidden_size, block_h))](
        products, row, chosen, weights, products if share is None else share, y, hidden_size, first_expert, local_experts,
        SLOTS=slots, TOP_K=top_k, BLOCK_H=block_h, HAS_SHARE=share is not None, HAS_ROWS=row is not None,
        **dependent_launch(products),
    )  # fmt: skip
    return y
