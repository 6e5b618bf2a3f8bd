"""Tensors as they lie in a file: described at once, read when asked for.

Files are mapped, not read: a loaded tensor is a view of the file's pages, which the system can drop and fetch again, so
opening a checkpoint of any size takes no memory of its own. The mapping is private and copy-on-write: the file on disk
can't be changed through it.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from firstlight.errors import CheckpointError

Range = tuple[int, int] | None
"""Start and stop along one dimension; None is all of it."""


class MappedFile:
    """A file's bytes, mapped. `data` is a memory map, or b"" for an empty file; it lives as long as its views."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if `path` isn't a regular file that can be read."""
        self.path = path
        if not path.exists():
            raise CheckpointError(f"{path}: no such file")
        if not path.is_file():  # a pipe or a device could block for ever
            raise CheckpointError(f"{path}: not a regular file")
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                empty = self.size == 0
                self.data: mmap.mmap | bytes = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from error

    def bytes_at(self, start: int, stop: int) -> Tensor:
        """Bytes [start, stop) as uint8 [stop - start], a view of the mapping."""
        if start == stop:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.data, dtype=torch.uint8, count=stop - start, offset=start)


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
        kind = self.ggml_type or str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.name!r}, {kind}, {list(self.shape)})"


def typed_view(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n * itemsize] as dtype [n]: a view where the address is aligned for the dtype, otherwise a copy."""
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def count_elements(shape: Sequence[int]) -> int:
    """Number of elements of a shape, exactly (Python integers don't overflow)."""
    return prod(shape)


def quoted(name: str) -> str:
    """A name from an untrusted file, fit for a message: escaped, and cut if it is long."""
    text = repr(name)
    return text if len(text) <= 200 else text[:200] + "...'"
