"""Block-scaled formats: one scale for each rectangle of `block` elements; value = element * scale.

The rectangle may be smaller than the checkpoint's 128 x 128: where a shard or a fused weight cuts a block, the scales are
repeated at the largest granularity that still divides every cut, so values stay exact.
"""

from __future__ import annotations

import torch

from firstlight.quant.format import Format, Packed, dtype_name


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a [..., rows, columns] tensor; edge blocks may be ragged."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def expand_scale(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """[..., blocks, blocks] scales -> one per element, [..., rows, columns]."""
    block = _within(block, shape)
    rows = scale.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]


def _within(block: tuple[int, int], shape: tuple[int, ...]) -> tuple[int, int]:
    """The block, no larger than a tensor of this shape."""
    return min(block[0], max(shape[-2], 1)), min(block[1], max(shape[-1], 1))


def unpack_blocks(weight: Packed) -> torch.Tensor:
    """Values in float32, [..., rows, columns]."""
    data = weight.parts["data"].float()
    if weight.format.block is None:
        return data
    return data * expand_scale(weight.parts["scale"].float(), tuple(data.shape), weight.format.block)


def pack_blocks(weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype, scale_dtype: torch.dtype) -> Packed:
    """Quantise a [..., rows, columns] tensor: scale = max|block| / largest finite value of `dtype`, rounded first.

    The scale is rounded to `scale_dtype` before elements are divided by it, so the stored pair is consistent.
    """
    form = Format(dtype_name(dtype), block, dtype_name(scale_dtype))
    block = _within(block, tuple(weight.shape))
    rows, columns = weight.shape[-2:]
    padded = torch.zeros(
        (*weight.shape[:-2], -(-rows // block[0]) * block[0], -(-columns // block[1]) * block[1]),
        dtype=torch.float32,
        device=weight.device,
    )
    padded[..., :rows, :columns] = weight
    tiles = padded.unflatten(-2, (-1, block[0])).unflatten(-1, (-1, block[1]))
    largest = tiles.abs().amax(dim=(-3, -1))
    scale = (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny).to(scale_dtype)
    scaled = weight.float() / expand_scale(scale.float(), tuple(weight.shape), block)
    limit = torch.finfo(dtype).max
    data = scaled.clamp(-limit, limit).to(dtype)
    return Packed({"data": data, "scale": scale}, form, tuple(weight.shape))
