"""Reading safetensors: the header is checked in full before a byte of data is touched.

The file is a length (8 bytes, little-endian), a JSON header of that length, and one buffer that the header divides into
tensors: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}. A checkpoint is one file, or
several with an index that names the file of each tensor. Nothing in it is trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from firstlight.errors import CheckpointError, quoted
from firstlight.weights.mapped_file import MappedFile
from firstlight.weights.stored import Range, StoredTensor, bytes_at, typed_view
from firstlight.weights.strict_json import parse_json_object, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 16

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class SafetensorsTensor(StoredTensor):
    """A tensor in a safetensors file, at [start, start + nbytes)."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, start: int, file: MappedFile) -> None:
        super().__init__(name, shape, dtype, prod(shape) * dtype.itemsize, file.path)
        self._start = start
        self._file = file

    def load_slice(self, ranges: Sequence[Range] | None) -> Tensor:
        """See StoredTensor. A view of the file, unless it isn't aligned for its dtype."""
        full = self.full_ranges(ranges)
        if not full:
            return typed_view(bytes_at(self._file, self._start, self._start + self.nbytes), self.dtype).reshape(())
        row_bytes = self.nbytes // self.shape[0] if self.shape[0] else 0
        first, last = full[0]
        raw = bytes_at(self._file, self._start + first * row_bytes, self._start + last * row_bytes)
        rows = typed_view(raw, self.dtype).reshape(last - first, *self.shape[1:])
        return rows[(slice(None), *(slice(start, stop) for start, stop in full[1:]))]


def read_safetensors_file(path: Path) -> dict[str, SafetensorsTensor]:
    """The tensors of one file. Raises CheckpointError, naming the file, for anything that the format doesn't allow."""
    file = MappedFile(path)
    if file.size < 8:
        raise CheckpointError(f"{path}: {file.size} bytes are too few for a safetensors file")
    header_bytes = int.from_bytes(file.data[:8], "little")
    buffer_start = 8 + header_bytes
    if header_bytes > MAX_HEADER_BYTES or buffer_start > file.size:
        raise CheckpointError(
            f"{path}: the header claims {header_bytes} bytes; the file has {file.size} and a header may have "
            f"{MAX_HEADER_BYTES}: it is not a safetensors file, or it is cut short"
        )
    header = parse_json_object(file.data[8:buffer_start], f"{path}: header")
    _check_metadata(path, header.pop("__metadata__", {}))
    tensors: dict[str, SafetensorsTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, begin, end = _check_entry(path, name, entry)
        tensors[name] = SafetensorsTensor(name, shape, dtype, buffer_start + begin, file)
        spans.append((begin, end, name))
    _check_spans(path, spans, file.size - buffer_start)
    return tensors


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")


def _check_entry(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one tensor's header entry."""
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: its entry must be an object with dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        supported = ", ".join(DTYPES)
        raise CheckpointError(f"{where}: dtype {quoted(str(entry['dtype']))} is not supported; supported: {supported}")
    shape = _integers(entry["shape"])
    if shape is None or len(shape) > MAX_DIMENSIONS or prod([max(size, 1) for size in shape]) >= 2**63:
        raise CheckpointError(
            f"{where}: shape must be a list of at most {MAX_DIMENSIONS} integers from 0 up, their product under 2^63"
        )
    offsets = _integers(entry["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets must be [begin, end], integers from 0 up, begin <= end")
    begin, end = offsets
    expected = prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{where}: {entry['dtype']} {list(shape)} takes {expected} bytes, but data_offsets give it {end - begin}"
        )
    return dtype, shape, begin, end


def _integers(value: Any) -> tuple[int, ...] | None:
    """The value as integers from 0 to 2^63 - 1, or None if it is anything else (True is no integer)."""
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
        return None
    return tuple(value)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], buffer_bytes: int) -> None:
    """The tensors must fill the buffer exactly, in some order: no overlap, no hole, nothing missing at the end."""
    covered = 0
    for begin, end, name in sorted(spans):
        if end > buffer_bytes:
            raise CheckpointError(
                f"{path}: the file is too short: tensor {quoted(name)} ends at byte {end} of the data, "
                f"but there are only {buffer_bytes}"
            )
        if begin < covered:
            raise CheckpointError(f"{path}: tensor {quoted(name)} at {begin} overlaps the one before, to {covered}")
        if begin > covered:
            raise CheckpointError(f"{path}: no tensor owns bytes {covered} to {begin} of the data")
        covered = end
    if covered != buffer_bytes:
        raise CheckpointError(f"{path}: no tensor owns bytes {covered} to {buffer_bytes} of the data")


def read_safetensors(directory: Path) -> dict[str, SafetensorsTensor]:
    """All tensors of a checkpoint directory: model.safetensors, an index and its shards, or the only *.safetensors.

    Raises CheckpointError, naming the file, if a shard is missing, short or malformed, if a tensor is not in the shard
    that the index names, or if two shards hold it. Tensors that a shard holds and the index doesn't name are included.
    """
    if (directory / SINGLE_FILE).exists():
        return read_safetensors_file(directory / SINGLE_FILE)
    if (directory / INDEX_FILE).exists():
        return _read_indexed(directory / INDEX_FILE)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return read_safetensors_file(files[0])
    if not files:
        raise CheckpointError(f"{directory}: there is no *.safetensors file")
    raise CheckpointError(
        f"{directory}: {len(files)} safetensors files ({files[0].name}, {files[1].name}, ...) but neither {SINGLE_FILE} "
        f"nor {INDEX_FILE} to say which belong together"
    )


def _read_indexed(index: Path) -> dict[str, SafetensorsTensor]:
    weight_map = read_json_object(index, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must be an object from tensor names to file names")
    shards: dict[str, dict[str, SafetensorsTensor]] = {}
    tensors: dict[str, SafetensorsTensor] = {}
    for shard in dict.fromkeys(weight_map.values()):
        path = _shard_path(index, shard)
        if not path.exists():
            count = sum(1 for value in weight_map.values() if value == shard)
            raise CheckpointError(f"{path}: missing shard: {index.name} places {count} tensors in it")
        shards[shard] = read_safetensors_file(path)
        for name, tensor in shards[shard].items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {quoted(name)} is in {tensors[name].path.name} too")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index.parent / shard}: tensor {quoted(name)} is not in it; {index.name} says it is"
            )
    return tensors


def _shard_path(index: Path, shard: str) -> Path:
    """The path of a shard, which must stay below the index's own directory."""
    parts = PurePosixPath(shard).parts
    inside = parts and parts[0] != "/" and ".." not in parts and not set(shard) & {"\\", ":"}
    if not inside or not shard.isprintable() or len(shard.encode()) > 200 or not shard.endswith(".safetensors"):
        raise CheckpointError(
            f"{index}: {quoted(shard)} is not the name of a *.safetensors file inside the checkpoint's directory"
        )
    return index.parent / shard
