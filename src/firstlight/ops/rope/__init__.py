"""Rotary position embedding: turns pairs of a head's dimensions by their token's angles."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape


def body(x: Tensor, angles: Tensor, *, interleaved: bool = False) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for each pair among the first 2 F dimensions; the others pass.

    x [T, heads, D], any strides; angles [T, 2 F] = cos | sin (see `rope_angles`), 2 F <= D, else ValueError.
    Pair i is (i, i + F), or (2 i, 2 i + 1) if interleaved. In float32 (float64 for float64 inputs), rounded once.
    Returns [T, heads, D] in x.dtype, contiguous. Tolerance: 1e-6 absolute times |x| in float32; one ulp of x.dtype.
    Source: RoFormer (2104.09864) equation 15, interleaved; GPT-NeoX's order otherwise.
    """
    turned = angles.shape[-1]
    if turned > x.shape[-1]:
        raise ValueError(f"rope: angles turn {turned} dimensions, but heads have {x.shape[-1]}")
    kind = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.to(kind).unsqueeze(1).chunk(2, dim=-1)
    wide = x[..., :turned].to(kind)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    if turned == x.shape[-1]:
        return joined.to(x.dtype)
    return torch.cat((joined.to(x.dtype), x[..., turned:]), dim=-1)


def abstract(x: Tensor, angles: Tensor, *, interleaved: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def cost(shape: Shape, x: Tensor, angles: Tensor, *, interleaved: bool = False) -> Cost:
    return Cost(read=x.nbytes + angles.nbytes, written=x.nbytes)


rope = Op("rope", body, abstract=abstract, cost=cost)
