"""Small arrays from the host to the device in one copy, which nobody waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 16
"""Bytes; where each array starts within the copy."""
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class Layout:
    """Where named arrays lie in one run of bytes: name -> (numpy dtype, shape)."""

    def __init__(self, **fields: tuple[type[np.generic], tuple[int, ...]]) -> None:
        self._places: dict[str, tuple[int, int, np.dtype, tuple[int, ...]]] = {}
        self.nbytes = 0
        for name, (kind, shape) in fields.items():
            dtype = np.dtype(kind)
            size = math.prod(shape) * dtype.itemsize
            self._places[name] = (self.nbytes, size, dtype, shape)
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def stage(self) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        """Zeros in pinned memory (where there is a GPU), [nbytes] uint8, and the arrays in it, to be written.

        The memory isn't given to anybody else before copies from it that were started have ended.
        """
        staging = torch.empty(max(self.nbytes, ALIGNMENT), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        memory = staging.numpy()
        memory[:] = 0
        arrays = {
            name: memory[offset : offset + size].view(dtype).reshape(shape)
            for name, (offset, size, dtype, shape) in self._places.items()
        }
        return staging, arrays

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as tensors over a copy of such memory on a device."""
        return {
            name: memory[offset : offset + size].view(_DTYPES[dtype.name]).view(shape)
            for name, (offset, size, dtype, shape) in self._places.items()
        }


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device, with their dtypes and shapes.

    On a GPU they travel as one copy from pinned memory, behind the work that the current stream already has; the host goes on
    at once. Later changes to the arrays don't show.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.array(array)) for array in arrays]
    layout = Layout(**{str(i): (array.dtype.type, array.shape) for i, array in enumerate(arrays)})
    staging, fields = layout.stage()
    for field, array in zip(fields.values(), arrays, strict=True):
        field[...] = array
    return list(layout.views(staging.to(device, non_blocking=True)).values())
