"""Kernel of `triton_fused`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def choose(
    logits_ptr, bias_ptr, live_ptr, x_ptr, gate_ptr, weights_ptr, experts_ptr, share_ptr,
    logits_stride_t, x_stride_t, H, scale,
    E: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_CHOICES: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIVE: tl.constexpr,
    HAS_GATE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The best of E, TOP_K times over; with HAS_GATE also share [T] = sigmoid(gate x), the shared expert's weight."""
    i_t = tl.program_id(0).to(tl.int64)
    o_e, o_j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_CHOICES)
    m_e = o_e < E
    b_logits = tl.load(logits_ptr + i_t * logits_stride_t + o_e, mask=m_e, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        b_scores = tl.sigmoid(b_logits)
    else:
        b_scores = tl.exp(b_logits - tl.max(b_logits, axis=0))
        b_scores /= tl.sum(b_scores, axis=0)
    b_choice = b_scores
    if HAS_BIAS:
        b_choice += tl.load(bias_ptr + o_e, mask=m_e, other=0.0).to(tl.float32)
    b_choice = tl.where(m_e, b_choice, float("-inf"))
    b_weights = tl.zeros([BLOCK_CHOICES], dtype=tl.float32)
    b_experts = tl.zeros([BLOCK_CHOICES], dtype=tl.int32)
    m_left = m_e
    for j in tl.static_range(TOP_K):
        # The lowest index among the largest that are left; a NaN counts as smaller than all, so that an index is found.
        b_left = tl.where(m_left & (b_choice == b_choice), b_choice, float("-inf"))
        best = tl.min(tl.where((b_left == tl.max(b_left, axis=0)) & m_left, o_e, BLOCK_E), axis=0)
        score = tl.sum(tl.where(o_e == best, b_scores, 0.0), axis=0)
        b_weights = tl.where(o_j == j, score, b_weights)
        b_experts = tl.where(o_j == j, best, b_experts)
        m_left = m_left & (o_e != best)
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
        b_dot = tl.zeros([BLOCK_H], dtype=tl.float32)
        for i_h in range(0, H, BLOCK_H):
            o_h = i_h + tl.arange(0, BLOCK_H)
            b_x = tl.load(x_ptr + i_t * x_stride_t + o_h, mask=o_h < H, other=0.0).to(tl.float32)
            b_dot += b_x * tl.load(gate_ptr + o_h, mask=o_h < H, other=0.0).to(tl.float32)
        tl.store(share_ptr + i_t, tl.sigmoid(tl.sum(b_dot, axis=0)))


def route(
    logits: Tensor, top_k: int, scoring: str, renormalise: bool, bias: Tensor | None, scale: float,
    live: Tensor | None, dtype: torch.dtype, x: Tensor | None = None, gate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [T, E], columns adjacent -> (weights [T, top_k], experts [T, top_k] int32, share [T] float32).

    share is filled if x [T, H] and gate [1, H] are given, columns adjacent.
    """
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=dtype, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    share = torch.empty(tokens if gate is not None else 0, dtype=torch.float32, device=logits.device)
    source, row = (logits, logits) if x is None or gate is None else (x, gate)
    if tokens:
        choose[(tokens,)](
            logits, logits if bias is None else bias, logits if live is None else live, source, row,
            weights, chosen, share, logits_stride_t=logits.stride(0), x_stride_t=source.stride(0), H=source.shape[1],
            scale=scale, E=experts, BLOCK_E=triton.next_power_of_2(experts), TOP_K=top_k,
            BLOCK_CHOICES=triton.next_power_of_2(top_k), SIGMOID=scoring == "sigmoid", RENORMALISE=renormalise,
            HAS_BIAS=bias is not None, HAS_LIVE=live is not None, HAS_GATE=gate is not None, BLOCK_H=1024,
            num_warps=1 if experts <= 1024 else 4,
        )  # fmt: skip
    return weights, chosen, share
