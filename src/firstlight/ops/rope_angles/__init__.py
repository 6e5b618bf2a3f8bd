"""Cosines and sines of rotary position embeddings: computed once a step, read by every attention layer."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.rope_angles import triton_fused


def body(
    positions: Tensor, inv_freq: Tensor, *, sections: tuple[int, int, int] | None = None, factor: float = 1.0
) -> Tensor:
    """out[t] = factor * (cos(p_t inv_freq) | sin(p_t inv_freq)).

    positions [T] int32 or int64, or [3, T] (time, height, width) for images; inv_freq [F] float32, radians a position.
    sections: how many frequencies each of the three rows turns, interleaved (MRoPE of Qwen3.5): with (a, b, c), height
    turns the b frequencies 1, 4, 7, ..., width the c frequencies 2, 5, 8, ..., time all others. Needed for [3, T], else
    ValueError; without effect for [T], where the three would be equal.
    Returns [T, 2 F], float32 (inv_freq's dtype). Tolerance: the float32 product p * inv_freq has p ulps of angle.
    Source: transformers `Qwen3_5TextRotaryEmbedding`; `LlamaRotaryEmbedding` with `attention_scaling` as factor.
    """
    if positions.dim() == 1:
        rows = positions[:, None]
    elif sections is None:
        raise ValueError(f"positions of shape {tuple(positions.shape)} need sections=, the frequencies of each row")
    else:
        rows = positions.index_select(0, _row_of_frequency(inv_freq, sections)).t()
    angle = rows.to(inv_freq.dtype) * inv_freq
    return torch.cat((angle.cos(), angle.sin()), dim=-1) * factor


def _row_of_frequency(inv_freq: Tensor, sections: tuple[int, int, int]) -> Tensor:
    """Which row of the positions (0 time, 1 height, 2 width) turns each frequency: [F]."""
    frequency = torch.arange(inv_freq.shape[0], device=inv_freq.device)
    axis, turn = frequency % 3, frequency // 3
    height = (axis == 1) & (turn < sections[1])
    width = (axis == 2) & (turn < sections[2])
    return height + 2 * width


def abstract(
    positions: Tensor, inv_freq: Tensor, *, sections: tuple[int, int, int] | None = None, factor: float = 1.0
) -> Tensor:
    return inv_freq.new_empty((positions.shape[-1], 2 * inv_freq.shape[0]))


def cost(
    shape: Shape,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    sections: tuple[int, int, int] | None = None,
    factor: float = 1.0,
) -> Cost:
    return Cost(read=positions.nbytes + inv_freq.nbytes, written=abstract(positions, inv_freq).nbytes)


rope_angles = Op("rope_angles", body, abstract=abstract, cost=cost)
rope_angles.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2)
