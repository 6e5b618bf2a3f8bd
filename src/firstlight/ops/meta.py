"""Torch functions that modules call between ops, without what they cost on the meta device.

There torch takes many functions through Python, and the first such call imports its compiler: a second, for a shape that is
plain. A walk that must be quick (prediction, binding) calls these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from firstlight.quant import Packed, Weight
from firstlight.quant.activations import concatenate_packed


def concatenate_tokens(pieces: Sequence[Weight]) -> Weight:
    """Rows [T, K] of several tensors, plain or packed activations, one after another; one alone is returned as it is."""
    if len(pieces) == 1:
        return pieces[0]
    packed = [piece for piece in pieces if isinstance(piece, Packed)]
    return concatenate_packed(packed) if packed else concatenate([x for x in pieces if isinstance(x, Tensor)])


def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat` of tensors of one dtype that agree in all but `dim`; one tensor alone is returned as it is."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if not first.is_meta:
        return torch.cat(list(tensors), dim)
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return first.new_empty(shape)


def subtract(x: Tensor, number: int) -> Tensor:
    """x - number, in x.dtype."""
    return x.new_empty(x.shape) if x.is_meta else x - number


def specs(value: Any) -> Any:
    """What of arguments tells one kind of call from another: shapes, dtypes and plain values, not which tensor it is. Hashable."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Packed):
        return value.shape, str(value.format)
    if isinstance(value, tuple | list):
        return tuple(specs(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, specs(item)) for name, item in sorted(value.items()))
    return value


def without_data(value: Any) -> Any:
    """A tensor or packed weight on the meta device, with its shape, strides and dtype; anything else as it is."""
    if isinstance(value, Packed):
        parts = {name: without_data(part) for name, part in value.parts.items()}
        return replace(value, parts=parts, plain=without_data(value.plain))
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value
