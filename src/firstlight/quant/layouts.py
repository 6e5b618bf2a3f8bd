"""Arrangements of a weight's payload, and the way back.

A provider that wants weights arranged its own way registers a `Layout`: `pack` turns a plain weight (a tensor, or Packed with
layout "plain") into parts, `unpack` restores the plain form exactly. The loader packs each weight once, when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from firstlight.quant.blocks import unpack_blocks
from firstlight.quant.format import PLAIN, Format, Packed, Weight, format_of
from firstlight.quant.gguf_blocks import GGML_TYPES, dequantize


@dataclass(frozen=True, slots=True)
class Layout:
    """One arrangement.

    pack: plain weight -> Packed in this layout. unpack: the inverse, exact. accepts: None if a weight of this format and
    shape can be arranged so, otherwise why not. nbytes: bytes of the arranged weight, from its format and shape.
    """

    name: str
    pack: Callable[[Weight], Packed]
    unpack: Callable[[Packed], Weight]
    accepts: Callable[[Format, tuple[int, ...]], str | None]
    nbytes: Callable[[Format, tuple[int, ...]], int]


LAYOUTS: dict[str, Layout] = {}


def register_layout(layout: Layout) -> Layout:
    """Make a layout known by its name."""
    if layout.name in LAYOUTS or layout.name == PLAIN:
        raise ValueError(f"two layouts are named {layout.name}")
    LAYOUTS[layout.name] = layout
    return layout


def repack(weight: Weight, layout: str) -> Weight:
    """The same values in another layout. Raises ValueError if the layout can't hold this format or shape."""
    current = format_of(weight)
    if current.layout == layout:
        return weight
    if current.layout != PLAIN:
        assert isinstance(weight, Packed)
        weight = LAYOUTS[current.layout].unpack(weight)
    if layout == PLAIN:
        return weight
    target = LAYOUTS[layout]
    if reason := target.accepts(format_of(weight), tuple(weight.shape)):
        raise ValueError(
            f"layout {layout} can't hold a {format_of(weight)} weight of shape {tuple(weight.shape)}: {reason}"
        )
    return target.pack(weight)


def unpack(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The values of a weight as an ordinary tensor of `dtype`. Scales are applied in float32, then cast once."""
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    weight = repack(weight, PLAIN)
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    if weight.format.dtype in GGML_TYPES:
        return dequantize(weight.parts["data"], weight.format.dtype, dtype).reshape(weight.shape)
    return unpack_blocks(weight).to(dtype)
