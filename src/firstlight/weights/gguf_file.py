"""The GGUF container: metadata and tensor descriptions at the head of a file, tensor data behind them.

    "GGUF" | version | tensor count | metadata count | metadata: key, type, value ... |
    tensors: name, dimensions (innermost first), type, offset ... | padding | data

The tables of types and block sizes come from the `gguf` package; the walk through the head is our own. That package's
reader makes an array object of every string, which takes seconds for a vocabulary of 49,152, and it believes the counts
and lengths it finds: a file that claims an array of 2^60 numbers makes it loop until memory is gone. Here every read is
checked against the file's end first, so that work and memory are bounded by the file's size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from firstlight.errors import CheckpointError, quoted
from firstlight.weights.mapped_file import MappedFile

SUPPORTED_VERSIONS = (2, 3)
MAX_DIMENSIONS = 4

SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}


@dataclass(frozen=True)
class GgufEntry:
    """One tensor's description. shape: outermost first, as torch has it. start: its first byte in the file."""

    name: str
    ggml_type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufFile:
    """An opened GGUF file: `metadata` (numbers, strings, lists of strings, NumPy arrays) and `entries` by name."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, naming the file and what is wrong with it."""
        self.path = path
        self.mapped = MappedFile(path)
        reader = _Reader(self.mapped)
        if reader.take(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file: it doesn't begin with 'GGUF'")
        version = reader.number("<I")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{path}: a big-endian GGUF file; convert it to little-endian first")
        if version not in SUPPORTED_VERSIONS:
            raise CheckpointError(f"{path}: GGUF version {version} is not supported; supported: 2 and 3")
        tensor_count, metadata_count = reader.number("<Q"), reader.number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = reader.string()
            if key in self.metadata:
                raise CheckpointError(f"{path}: metadata key {quoted(key)} appears twice")
            self.metadata[key] = reader.value(key)
        described = [self._describe(reader) for _ in _counted(reader, tensor_count)]
        self.entries = self._place(described, reader.position)

    def _describe(self, reader: _Reader) -> tuple[str, str, tuple[int, ...], int]:
        """Name, type, shape and relative offset of the next tensor description."""
        name = reader.string()
        where = f"{self.path}: tensor {quoted(name)}"
        dimensions = reader.number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(f"{where}: {dimensions} dimensions; a GGUF tensor has 1 to {MAX_DIMENSIONS}")
        shape = tuple(reader.number("<Q") for _ in range(dimensions))[::-1]
        if min(shape) == 0 or prod(shape) >= 2**63:
            raise CheckpointError(f"{where}: impossible shape {list(shape)}")
        type_number = reader.number("<I")
        try:
            ggml_type = GGMLQuantizationType(type_number).name
        except ValueError:
            raise CheckpointError(f"{where}: unknown tensor type {type_number}") from None
        return name, ggml_type, shape, reader.number("<Q")

    def _place(self, described: list[tuple[str, str, tuple[int, ...], int]], header_end: int) -> dict[str, GgufEntry]:
        """The entries, each checked to lie within the file, aligned, and apart from the others."""
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment must be a power of two from 8 up, not {alignment!r}")
        data_start = -(-header_end // alignment) * alignment
        entries: dict[str, GgufEntry] = {}
        end = data_start
        for name, ggml_type, shape, offset in sorted(described, key=lambda entry: entry[3]):
            where = f"{self.path}: tensor {quoted(name)}"
            if name in entries:
                raise CheckpointError(f"{where}: appears twice")
            block_weights, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[ggml_type]]
            if shape[-1] % block_weights:
                raise CheckpointError(
                    f"{where}: rows of {shape[-1]} are not a whole number of {ggml_type} blocks of {block_weights}"
                )
            nbytes = prod(shape) // block_weights * block_bytes
            start = data_start + offset
            if offset % alignment:
                raise CheckpointError(f"{where}: offset {offset} is not a multiple of the alignment, {alignment}")
            if start < end:
                raise CheckpointError(f"{where}: overlaps the tensor before it")
            end = start + nbytes
            if end > self.mapped.size:
                raise CheckpointError(
                    f"{where}: ends at byte {end}, but the file has {self.mapped.size}: the file is cut short"
                )
            entries[name] = GgufEntry(name, ggml_type, shape, start, nbytes)
        return {name: entries[name] for name, *_ in described}


def _counted(reader: _Reader, count: int) -> range:
    """range(count), after a check that so many tensor descriptions can fit: each takes 32 bytes at least."""
    if count * 32 > reader.mapped.size:
        raise CheckpointError(f"{reader.mapped.path}: claims {count} tensors, more than the file can hold")
    return range(count)


class _Reader:
    """Walks through a mapped file; every read is checked against its end."""

    def __init__(self, mapped: MappedFile) -> None:
        self.mapped = mapped
        self.position = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        start, self.position = self.position, self.position + count
        if self.position > self.mapped.size:
            raise CheckpointError(
                f"{self.mapped.path}: {count} bytes expected at byte {start}, but the file has {self.mapped.size}: "
                f"it is cut short or damaged"
            )
        return self.mapped.data[start : self.position]

    def number(self, code: str) -> Any:
        """The next number, by its struct code."""
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        """The next string: length (uint64), then UTF-8."""
        content = self.take(int.from_bytes(self.take(8), "little"))
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.mapped.path}: a string before byte {self.position} isn't UTF-8") from error

    def value(self, key: str) -> Any:
        """The next metadata value: type (uint32), then the value."""
        kind = self._kind(key)
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return _number_value(kind, self.number(SCALARS[kind]))
        kind, count = self._kind(key), self.number("<Q")
        if kind is GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.mapped.path}: metadata {quoted(key)}: arrays of arrays are not supported")
        if kind is GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)

    def _kind(self, key: str) -> GGUFValueType:
        number = self.number("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(f"{self.mapped.path}: metadata {quoted(key)}: unknown type {number}") from None


def _number_value(kind: GGUFValueType, value: Any) -> Any:
    """A float32 as the shortest decimal that rounds to it (1e-05, not 9.999999747378752e-06); others as they are."""
    return float(str(np.float32(value))) if kind is GGUFValueType.FLOAT32 else value
