"""All angles of a step in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import power_of_two, unavailable


def when(call: Call) -> str | None:
    """Float32 frequencies."""
    if reason := unavailable(call.hardware):
        return reason
    inv_freq = call.args[1]
    return None if inv_freq.dtype == torch.float32 else f"computes in float32, and the frequencies are {inv_freq.dtype}"


def run(
    positions: Tensor, inv_freq: Tensor, *, sections: tuple[int, int, int] | None = None, factor: float = 1.0
) -> Tensor:
    """The contract of `rope_angles`."""
    from firstlight.ops.rope_angles.triton_fused_kernel import BLOCK_T, rope_angles_kernel

    several = positions.dim() > 1
    if several and sections is None:
        raise ValueError(f"positions of shape {tuple(positions.shape)} need sections=, the frequencies of each row")
    tokens, frequencies = positions.shape[-1], inv_freq.shape[0]
    out = inv_freq.new_empty((tokens, 2 * frequencies))
    _, height, width = sections or (0, 0, 0)
    if tokens:
        rope_angles_kernel[(-(-tokens // BLOCK_T),)](
            positions,
            inv_freq,
            out,
            factor,
            tokens,
            positions.stride(0) if several else 0,
            positions.stride(-1),
            height,
            width,
            F=frequencies,
            SEVERAL=several,
            BLOCK_F=power_of_two(frequencies),
            BLOCK_T=BLOCK_T,
            num_warps=4,
        )
    return out
