"""Kernel of `triton_fused`."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firstlight.ops.experts.triton_list_kernels import Lists, append_pairs
from firstlight.ops.triton_launch import dependent_launch, kernel, wait_for_inputs
from firstlight.ops.triton_support import power_of_two


@kernel
def choose(
    logits_ptr, bias_ptr, live_ptr, x_ptr, gate_ptr, weights_ptr, experts_ptr, share_ptr, count_ptr, list_ptr,
    logits_stride_part, logits_stride_t, x_stride_t, H, scale, parts, first_expert, local_experts, slots,
    E: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_CHOICES: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIVE: tl.constexpr,
    HAS_GATE: tl.constexpr, BLOCK_H: tl.constexpr, SUMMED: tl.constexpr, MOST_PARTS: tl.constexpr, DTYPE: tl.constexpr,
    HAS_LISTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of E, TOP_K times over; with HAS_GATE also share [T] = sigmoid(gate x), the shared expert's weight.

    SUMMED: logits are a sum over `parts`, rounded to DTYPE; the gate's product is then column E, and not computed here.
    HAS_LISTS: each choice is appended to its expert's list as pair token * slots + choice.
    """
    i_t = tl.program_id(0).to(tl.int64)
    o_e, o_j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_CHOICES)
    m_e = o_e < E
    gate = 0.0
    o_h = tl.arange(0, BLOCK_H)
    if HAS_GATE and not SUMMED:
        b_gate = tl.load(gate_ptr + o_h, mask=o_h < H, other=0.0).to(tl.float32)  # a weight needn't wait
    wait_for_inputs(PDL)
    if HAS_GATE:
        if SUMMED:
            o_all = tl.arange(0, MOST_PARTS)
            p_gate = logits_ptr + i_t * logits_stride_t + o_all * logits_stride_part + E
            gate = tl.sum(tl.load(p_gate, mask=o_all < parts, other=0.0), axis=0)
        else:
            p_x = x_ptr + i_t * x_stride_t + o_h
            b_dot = tl.load(p_x, mask=o_h < H, other=0.0).to(tl.float32) * b_gate
            for i_h in range(BLOCK_H, H, BLOCK_H):
                m_h = i_h + o_h < H
                b_gate = tl.load(gate_ptr + i_h + o_h, mask=m_h, other=0.0).to(tl.float32)
                b_dot += tl.load(p_x + i_h, mask=m_h, other=0.0).to(tl.float32) * b_gate
            gate = tl.sum(b_dot, axis=0)
    p_logits = logits_ptr + i_t * logits_stride_t + o_e
    if SUMMED:
        # Eight parts are on the way at once: a load each would wait for the one before it.
        b_logits = tl.zeros([BLOCK_E], dtype=tl.float32)
        for i_part in range(0, parts, 8):
            o_part = i_part + tl.arange(0, 8)[:, None]
            p_part = p_logits[None, :] + o_part * logits_stride_part
            b_logits += tl.sum(tl.load(p_part, mask=m_e[None, :] & (o_part < parts), other=0.0), axis=0)
        b_logits = tl.where(m_e, b_logits.to(DTYPE).to(tl.float32), float("-inf"))
    else:
        b_logits = tl.load(p_logits, mask=m_e, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        b_scores = tl.sigmoid(b_logits)
    else:
        b_scores = tl.exp(b_logits - tl.max(b_logits, axis=0))
        b_scores /= tl.sum(b_scores, axis=0)
    b_choice = b_scores
    if HAS_BIAS:
        b_choice += tl.load(bias_ptr + o_e, mask=m_e, other=0.0).to(tl.float32)
    b_choice = tl.where(m_e & (b_choice == b_choice), b_choice, float("-inf"))  # NaN counts as smaller than all
    b_weights = tl.zeros([BLOCK_CHOICES], dtype=tl.float32)
    b_experts = tl.zeros([BLOCK_CHOICES], dtype=tl.int32)
    # One integer orders by value, then by index, the lower first: a search is one reduction.
    b_bits = tl.where(b_choice == 0.0, 0.0, b_choice).to(tl.int32, bitcast=True)
    b_key = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits).to(tl.int64) << 32 | (BLOCK_E - 1 - o_e).to(tl.int64)
    for j in tl.static_range(TOP_K):
        key = tl.max(b_key, axis=0)
        best = BLOCK_E - 1 - (key & 0xFFFFFFFF).to(tl.int32)
        if HAS_BIAS:
            score = tl.sum(tl.where(o_e == best, b_scores, 0.0), axis=0)
        else:  # not negative, so these are its own bits
            score = (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        b_weights = tl.where(o_j == j, score, b_weights)
        b_experts = tl.where(o_j == j, best, b_experts)
        b_key = tl.where(o_e == best, -(2**63), b_key)
    if RENORMALISE:
        b_weights /= tl.sum(b_weights, axis=0) + 1e-20
    b_weights *= scale
    if HAS_LIVE:
        padding = i_t >= tl.load(live_ptr)
        b_weights = tl.where(padding, 0.0, b_weights)
        b_experts = tl.where(padding, -1, b_experts)
    m_j = o_j < TOP_K
    tl.store(weights_ptr + i_t * TOP_K + o_j, b_weights.to(weights_ptr.dtype.element_ty), mask=m_j)
    tl.store(experts_ptr + i_t * TOP_K + o_j, b_experts, mask=m_j)
    if HAS_GATE:
        tl.store(share_ptr + i_t, tl.sigmoid(gate))
    if HAS_LISTS:
        b_local = b_experts - first_expert
        m_local = m_j & (b_experts >= 0) & (b_local >= 0) & (b_local < local_experts)
        append_pairs(count_ptr, list_ptr, b_local, (i_t * slots).to(tl.int32) + o_j, m_local, tl.num_programs(0))


def choose_experts(
    logits: Tensor, experts: int, top_k: int, scoring: str, renormalise: bool, bias: Tensor | None, scale: float,
    live: Tensor | None, dtype: torch.dtype, *, gate: tuple[Tensor, Tensor] | None = None,
    lists: Lists | None = None, first_expert: int = 0, summed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [1, T, E], or with `summed` [parts, T, >= E + 1] -> (weights [T, k], experts [T, k] int32, share [T] float32).

    gate: (x [T, H], row [1, H]), whose product makes share, the shared expert's weight; of summed logits it is column E.
    lists: get each choice of a local expert, of which `first_expert` is the first. Columns are adjacent everywhere.
    """
    parts, tokens, _ = logits.shape
    weights = torch.empty((tokens, top_k), dtype=dtype, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    share = torch.empty(0 if gate is None else tokens, dtype=torch.float32, device=logits.device)
    source, row = gate or (logits[0], logits)
    count, entries = (lists.count, lists.entries) if lists else (chosen, chosen)
    if tokens:
        choose[(tokens,)](
            logits, logits if bias is None else bias, logits if live is None else live, source, row,
            weights, chosen, share, count, entries, logits_stride_part=logits.stride(0),
            logits_stride_t=logits.stride(1), x_stride_t=source.stride(0), H=source.shape[1], scale=scale, parts=parts,
            first_expert=first_expert, local_experts=entries.shape[0], slots=lists.slots if lists else 0,
            E=experts, BLOCK_E=power_of_two(experts), TOP_K=top_k,
            BLOCK_CHOICES=power_of_two(top_k), SIGMOID=scoring == "sigmoid", RENORMALISE=renormalise,
            HAS_BIAS=bias is not None, HAS_LIVE=live is not None, HAS_GATE=gate is not None, BLOCK_H=min(2048, power_of_two(source.shape[1])),
            SUMMED=summed, MOST_PARTS=power_of_two(parts),
            DTYPE=getattr(tl, str(dtype).removeprefix("torch.")), HAS_LISTS=lists is not None,
            num_warps=1 if experts <= 1024 else 4, **dependent_launch(logits),
        )  # fmt: skip
    return weights, chosen, share
