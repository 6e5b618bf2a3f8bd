"""Tensors as they lie in a file: described at once, read when asked for.

A loaded tensor is a view of the mapped file's pages, which the system can drop and fetch again, so that reading a
checkpoint of any size takes no memory of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from firstlight.quant import dtype_name
from firstlight.weights.mapped_file import MappedFile

Range = tuple[int, int] | None
"""Start and stop along one dimension; None is all of it."""


class StoredTensor(ABC):
    """One tensor of a checkpoint, not yet read.

    shape and dtype are those of the values; nbytes is what they take in the file. `ggml_type` names the block format of
    a GGUF tensor ("Q4_0", "F32"); it is None for safetensors.
    """

    ggml_type: str | None = None

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int, path: Path) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.nbytes = nbytes
        self.path = path

    def load(self) -> Tensor:
        """The values, `dtype` [*shape], on the CPU. Often a view of the mapped file: copy it before writing to it."""
        return self.load_slice(None)

    @abstractmethod
    def load_slice(self, ranges: Sequence[Range] | None) -> Tensor:
        """The part of the values within `ranges`, a (start, stop) or None for each leading dimension.

        Missing trailing dimensions are whole. Only the pages of that part are read. Raises IndexError if a range isn't
        within the shape.
        """

    def full_ranges(self, ranges: Sequence[Range] | None) -> list[tuple[int, int]]:
        """A (start, stop) for every dimension. Raises IndexError, naming the tensor, if one isn't within the shape."""
        given = list(ranges or ())
        if len(given) > len(self.shape):
            raise IndexError(f"{self.name}: {len(given)} ranges for a tensor of shape {list(self.shape)}")
        given += [None] * (len(self.shape) - len(given))
        full = [(0, size) if part is None else part for part, size in zip(given, self.shape, strict=True)]
        for (start, stop), size in zip(full, self.shape, strict=True):
            if not 0 <= start <= stop <= size:
                raise IndexError(f"{self.name}: range {start}:{stop} isn't within shape {list(self.shape)}")
        return full

    def __repr__(self) -> str:
        kind = self.ggml_type or dtype_name(self.dtype)
        return f"{type(self).__name__}({self.name!r}, {kind}, {list(self.shape)})"


def bytes_at(file: MappedFile, start: int, stop: int) -> Tensor:
    """Bytes [start, stop) of a file as uint8 [stop - start], a view of the mapping, which it keeps alive."""
    if start == stop:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(file.data, dtype=torch.uint8, count=stop - start, offset=start)


def typed_view(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n * itemsize] as dtype [n]: a view where the address is aligned for the dtype, otherwise a copy."""
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
