"""A GGUF file as a checkpoint: tensors under their Hugging Face names, in the published order of rows and columns.

The converters that write GGUF files rename tensors, and rearrange some to suit another engine's kernels. Each tensor
here carries an `Arrangement` that undoes this when it is read. Rows are whole blocks, so a change of row order (all that
most tensors have) works on packed blocks too: a weight can stay in its few bits from disk to matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.errors import CheckpointError, quoted
from firstlight.quant.gguf_blocks import GGML_TYPES, bytes_per_row, dequantize
from firstlight.weights.gguf_config import gguf_config
from firstlight.weights.gguf_file import GgufEntry, GgufFile
from firstlight.weights.gguf_names import Arrangement, published_tensors
from firstlight.weights.mapped_file import MappedFile
from firstlight.weights.stored import Range, StoredTensor, bytes_at


class GgufTensor(StoredTensor):
    """A tensor in a GGUF file.

    `dtype` is float32 for block types, otherwise that of the file. A tensor of two dimensions or more is seen as rows:
    all dimensions but the last.
    """

    ggml_type: str

    def __init__(self, name: str, entry: GgufEntry, file: MappedFile, arrangement: Arrangement) -> None:
        dtype = GGML_TYPES[entry.ggml_type].dtype or torch.float32
        super().__init__(name, arrangement.shape or entry.shape, dtype, entry.nbytes, file.path)
        self.ggml_type = entry.ggml_type
        self._start = entry.start
        self._file = file
        self._arrangement = arrangement

    @property
    def can_stay_packed(self) -> bool:
        """Whether `load_packed` works: the published values are the file's, whatever the order of their rows."""
        return len(self.shape) > 1 and self._arrangement.columns is None and self._arrangement.values is None

    def load_packed(self, ranges: Sequence[Range] | None = None) -> Tensor:
        """The blocks as they are stored: uint8 [*leading dimensions, bytes], cut to `ranges`.

        Raises ValueError if the tensor can't stay packed, or if a range of the last dimension cuts through a block.
        """
        if not self.can_stay_packed:
            raise ValueError(f"{self.name}: its stored blocks don't hold the published values in order; use load_slice")
        full = self.full_ranges(ranges)
        block = GGML_TYPES[self.ggml_type]
        first, last = full[-1]
        if first % block.weights or (last % block.weights and last != self.shape[-1]):
            raise ValueError(
                f"{self.name}: columns {first}:{last} cut through {self.ggml_type} blocks of {block.weights} weights"
            )
        raw = self._raw_rows(*full[0])
        middle = tuple(slice(start, stop) for start, stop in full[1:-1])
        columns = slice(first // block.weights * block.bytes, last // block.weights * block.bytes)
        return raw[(slice(None), *middle, columns)]

    def load_slice(self, ranges: Sequence[Range] | None) -> Tensor:
        """See StoredTensor. Blocks are dequantised to float32; only the blocks that `ranges` touch are."""
        full = self.full_ranges(ranges)
        arrangement = self._arrangement
        if len(full) == 1:
            whole = dequantize(bytes_at(self._file, self._start, self._start + self.nbytes), self.ggml_type, self.dtype)
            values = whole if arrangement.rows is None else whole[arrangement.rows]
            values = values[slice(*full[0])]
        else:
            values = self._columns(self._raw_rows(*full[0]), *full[-1])
            values = values[(slice(None), *(slice(start, stop) for start, stop in full[1:-1]))]
        return values if arrangement.values is None else arrangement.values(values)

    def _raw_rows(self, first: int, last: int) -> Tensor:
        """Raw rows of indices [first, last) of the first dimension: uint8 [last - first, *shape[1:-1], bytes]."""
        row_bytes = prod(self.shape[1:-1]) * bytes_per_row(self.shape[-1], self.ggml_type)
        if self._arrangement.rows is None:
            raw = bytes_at(self._file, self._start + first * row_bytes, self._start + last * row_bytes)
        else:
            whole = bytes_at(self._file, self._start, self._start + self.nbytes)
            raw = whole.reshape(self.shape[0], row_bytes)[self._arrangement.rows[first:last]]
        return raw.reshape(last - first, *self.shape[1:-1], -1) if last > first else self._no_rows()

    def _no_rows(self) -> Tensor:
        size = bytes_per_row(self.shape[-1], self.ggml_type)
        return torch.empty(0, *self.shape[1:-1], size, dtype=torch.uint8)

    def _columns(self, raw: Tensor, first: int, last: int) -> Tensor:
        """Values of columns [first, last) of raw rows."""
        if self._arrangement.columns is not None:
            return dequantize(raw, self.ggml_type, self.dtype)[..., self._arrangement.columns[first:last]]
        block = GGML_TYPES[self.ggml_type]
        first_block, last_block = first // block.weights, -(-last // block.weights)
        cut = raw[..., first_block * block.bytes : last_block * block.bytes]
        skipped = first_block * block.weights
        return dequantize(cut, self.ggml_type, self.dtype)[..., first - skipped : last - skipped]


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor], dict[str, Any]]:
    """Configuration (as config.json would have it), tensors by Hugging Face name, and metadata of a GGUF file.

    Raises CheckpointError, naming the file, if it is malformed, of an unsupported architecture, or holds a tensor of
    an unsupported type or unknown name.
    """
    file = GgufFile(path)
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{path}: one of {file.metadata['split.count']} parts; merge them first (llama-gguf-split --merge)"
        )
    config = gguf_config(file)
    tensors: dict[str, GgufTensor] = {}
    for entry in file.entries.values():
        if entry.ggml_type not in GGML_TYPES:
            raise CheckpointError(
                f"{path}: tensor {quoted(entry.name)} is of type {entry.ggml_type}, which is not supported; "
                f"supported: {', '.join(GGML_TYPES)}"
            )
        for name, part, arrangement in published_tensors(entry, config, path):
            if name in tensors:
                raise CheckpointError(f"{path}: two tensors stand for {name}")
            tensors[name] = GgufTensor(name, part, file.mapped, arrangement)
    return config, tensors, file.metadata
