"""e4m3 as older AMD GPUs (gfx942) multiply it: with an exponent bias of 8 in place of 7, and no negative zero.

The same bits stand for half the value, so a weight in scaled blocks is converted by its scales alone: they are doubled.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from firstlight.quant.format import PLAIN, Format, Packed, Weight
from firstlight.quant.layouts import Layout, register_layout

LAYOUT_NAME = "e4m3fnuz"
NEGATIVE_ZERO = 0x80
"""Of e4m3fn; in e4m3fnuz these bits are its only NaN."""
NAN = 0x7F
"""Of e4m3fn, with either sign; in e4m3fnuz the largest number."""


def pack(weight: Weight) -> Packed:
    """Blocks of e4m3fn -> of e4m3fnuz: -0 becomes 0, NaN stays NaN, scales double."""
    assert isinstance(weight, Packed)
    bits = weight.parts["data"].view(torch.uint8)
    bits = torch.where(bits == NEGATIVE_ZERO, 0, torch.where(bits & NAN == NAN, NEGATIVE_ZERO, bits))
    parts = {"data": bits.view(torch.float8_e4m3fnuz), "scale": weight.parts["scale"] * 2}
    return replace(weight, parts=parts, format=weight.format.with_layout(LAYOUT_NAME))


def unpack(weight: Packed) -> Packed:
    """The inverse, but for the sign of zeros and NaN."""
    bits = weight.parts["data"].view(torch.uint8)
    bits = torch.where(bits == NEGATIVE_ZERO, NAN, bits)
    parts = {"data": bits.view(torch.float8_e4m3fn), "scale": weight.parts["scale"] / 2}
    return replace(weight, parts=parts, format=weight.format.with_layout(PLAIN))


def accepts(form: Format, shape: tuple[int, ...]) -> str | None:
    """Why a weight can't be converted, or None."""
    if form.dtype != "float8_e4m3fn" or form.block is None:
        return f"converts float8_e4m3fn in scaled blocks, not {form}"
    return None


def nbytes(form: Format, shape: tuple[int, ...]) -> int:
    """Payload and scales, as in the checkpoint."""
    assert form.block is not None
    assert form.scale_dtype is not None
    *stack, rows, columns = shape
    scales = -(-rows // form.block[0]) * -(-columns // form.block[1]) * getattr(torch, form.scale_dtype).itemsize
    return int(torch.Size(stack).numel()) * (rows * columns + scales)


E4M3FNUZ = register_layout(Layout(LAYOUT_NAME, pack, unpack, accepts, nbytes))
