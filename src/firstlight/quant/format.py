"""How numbers are stored: one vocabulary for weights, activations and cache rows.

A `Format` names a stored form; `Packed` is a tensor in such a form: named parts (payload, scales) plus the format and the
logical shape. `unpack(pack(w))` gives back exactly what the stored values stand for, for every format and layout, so a
reference can read any packed weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

PLAIN = "plain"
WHOLE_ROW = 1 << 30
"""Columns of a block that spans a row, whatever the row's length: a scale for each row."""


@dataclass(frozen=True, slots=True)
class Format:
    """A stored form of a [..., rows, columns] tensor.

    dtype: what an element is stored as: a torch dtype's name ("bfloat16", "float8_e4m3fn") or a GGUF block type ("Q4_0").
    block: (rows, columns) that share a scale, columns perhaps `WHOLE_ROW`, or None without scales. For GGUF types the scales sit inside the payload.
    scale_dtype: dtype name of the scales. value = element * scale.
    layout: how the payload is arranged ("plain": row-major as in the checkpoint); others are registered in `layouts`.
    """

    dtype: str
    block: tuple[int, int] | None = None
    scale_dtype: str | None = None
    layout: str = PLAIN

    @property
    def is_plain(self) -> bool:
        """Whether a tensor in this format is just a torch tensor."""
        return self.block is None and self.layout == PLAIN and hasattr(torch, self.dtype)

    @property
    def by_row(self) -> bool:
        """Whether each row has one scale, however long it is."""
        return self.block == (1, WHOLE_ROW)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of an element. Raises TypeError for GGUF block types, which have none."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"format {self.dtype} has no torch dtype: it is stored in blocks")
        return dtype

    def with_layout(self, layout: str) -> Format:
        """The same values arranged otherwise."""
        return replace(self, layout=layout)

    def __str__(self) -> str:
        text = self.dtype
        if self.block and self.scale_dtype:
            columns = "row" if self.by_row else self.block[1]
            text += f"/{self.block[0]}x{columns}:{self.scale_dtype}"
        return text if self.layout == PLAIN else f"{text}@{self.layout}"


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def plain(dtype: torch.dtype) -> Format:
    """The format of an ordinary tensor."""
    return Format(dtype_name(dtype))


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor in a format that isn't plain.

    parts: "data" (payload) and, with scales outside the payload, "scale". shape: logical shape, as if unpacked.
    plain: of activations, the tensor that was packed, where somebody wants that too; no part of the packed form.
    """

    parts: Mapping[str, torch.Tensor]
    format: Format
    shape: tuple[int, ...]
    plain: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return next(iter(self.parts.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def __getitem__(self, index: int) -> Packed:
        """One entry along the leading dimension (an expert of a stack)."""
        if len(self.shape) < 3:
            raise IndexError(f"a packed {len(self.shape)}-D tensor can't be indexed; only stacks of matrices can")
        return Packed({name: part[index] for name, part in self.parts.items()}, self.format, self.shape[1:])


Weight = torch.Tensor | Packed


def format_of(weight: Weight) -> Format:
    """The format of a weight, plain or packed."""
    return weight.format if isinstance(weight, Packed) else plain(weight.dtype)


def nbytes(weight: Weight) -> int:
    """Bytes that a weight takes (meta tensors too)."""
    return weight.nbytes if isinstance(weight, Packed) else weight.numel() * weight.element_size()
