"""GGUF's block formats: how a few bytes hold 32 or 256 weights.

A row of weights is cut into blocks; a block is stored as its scale (and minimum) followed by small integers, and weight
= scale * integer (+ minimum). Formats ending in 0 have a scale only, those ending in 1 a minimum too, and the K formats
hold 256 weights as sub-blocks whose own scales are six- or eight-bit integers under one 16-bit scale.

Everything here works on raw rows, uint8 [..., bytes_per_row], on any device: a row never shares a block with another,
so rows can be sliced, permuted and split over ranks without being unpacked. Results are equal, bit for bit in float32,
to those of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockFormat:
    """How many weights a block holds and in how many bytes; `dtype` for the formats that are plain numbers."""

    weights: int
    bytes: int
    dtype: torch.dtype | None = None


GGML_TYPES: dict[str, BlockFormat] = {
    "F32": BlockFormat(1, 4, torch.float32),
    "F16": BlockFormat(1, 2, torch.float16),
    "BF16": BlockFormat(1, 2, torch.bfloat16),
    "Q4_0": BlockFormat(32, 18),
    "Q4_1": BlockFormat(32, 20),
    "Q5_0": BlockFormat(32, 22),
    "Q5_1": BlockFormat(32, 24),
    "Q8_0": BlockFormat(32, 34),
    "Q4_K": BlockFormat(256, 144),
    "Q5_K": BlockFormat(256, 176),
    "Q6_K": BlockFormat(256, 210),
}


def block_format(ggml_type: str) -> BlockFormat:
    """The block format of a ggml type, such as "Q4_0". Raises ValueError, listing the supported ones, for any other."""
    try:
        return GGML_TYPES[ggml_type]
    except KeyError:
        supported = ", ".join(GGML_TYPES)
        raise ValueError(f"GGUF tensor type {ggml_type} is not supported; supported: {supported}") from None


def bytes_per_row(columns: int, ggml_type: str) -> int:
    """Bytes of a row of `columns` weights. Raises ValueError if the row isn't a whole number of blocks."""
    block = block_format(ggml_type)
    if columns % block.weights:
        raise ValueError(
            f"a row of {columns} weights is not a whole number of {ggml_type} blocks of {block.weights} weights"
        )
    return columns // block.weights * block.bytes


def dequantize(raw: Tensor, ggml_type: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights [..., columns] in `dtype` from raw rows, uint8 [..., bytes_per_row].

    The arithmetic is in float32 and rounded to `dtype` once, at the end; plain formats are cast directly. For F32, F16
    and BF16 in their own dtype the result is a view of `raw` where its alignment allows.
    Raises ValueError for an unsupported type or rows that aren't whole blocks, TypeError if `raw` isn't uint8.
    """
    block = block_format(ggml_type)
    if raw.dtype != torch.uint8:
        raise TypeError(f"raw GGUF rows must be uint8, not {raw.dtype}")
    if raw.shape[-1] % block.bytes:
        raise ValueError(
            f"rows of {raw.shape[-1]} bytes are not a whole number of {ggml_type} blocks of {block.bytes} bytes"
        )
    columns = raw.shape[-1] // block.bytes * block.weights
    if block.dtype is not None:
        return _view_as(raw, block.dtype).to(dtype)
    if not raw.numel():
        return raw.new_empty((*raw.shape[:-1], columns), dtype=dtype)
    blocks = raw.reshape(-1, block.bytes)
    values = _UNPACK[ggml_type](blocks)
    return values.reshape(*raw.shape[:-1], columns).to(dtype)


def quantize(values: Tensor, ggml_type: str) -> Tensor:
    """Raw rows, uint8 [..., bytes_per_row], of float weights [..., columns]; on the CPU, through the `gguf` package.

    Raises ValueError for the K formats, which that package can't write, and for rows that aren't whole blocks.
    """
    from gguf import GGMLQuantizationType, quants

    size = bytes_per_row(values.shape[-1], ggml_type)
    try:
        raw = quants.quantize(values.detach().to("cpu", torch.float32).numpy(), GGMLQuantizationType[ggml_type])
    except NotImplementedError:
        raise ValueError(f"quantising to {ggml_type} is not supported: the gguf package can only read it") from None
    return torch.from_numpy(raw).view(torch.uint8).reshape(*values.shape[:-1], size)


def _view_as(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., n * itemsize] seen as [..., n] of dtype; copied first if its address or strides forbid a view."""
    if raw.data_ptr() % dtype.itemsize or not raw.is_contiguous():
        raw = raw.clone(memory_format=torch.contiguous_format)
    return raw.view(dtype)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as float32 [blocks, 1]."""
    return _view_as(blocks[:, start : start + 2], torch.float16).float()


def _nibbles(packed: Tensor, group: int) -> Tensor:
    """Four-bit integers of uint8 [blocks, n]: in each group of bytes first all low halves, then all high ones."""
    grouped = packed.reshape(packed.shape[0], -1, 1, group)
    return torch.cat((grouped & 15, grouped >> 4), dim=2).reshape(packed.shape[0], -1)


def _bits(packed: Tensor) -> Tensor:
    """Bits of uint8 [blocks, n], lowest first: [blocks, 8 n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(1)


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    """scale f16 | 16 bytes of nibbles; weight = scale * (nibble - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).float() - 8)


def _unpack_q4_1(blocks: Tensor) -> Tensor:
    """scale f16 | minimum f16 | 16 bytes of nibbles; weight = scale * nibble + minimum."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).float() + _half(blocks, 2)


def _unpack_q5_0(blocks: Tensor) -> Tensor:
    """scale f16 | 32 fifth bits | 16 bytes of nibbles; weight = scale * (integer - 16)."""
    integers = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (integers.float() - 16)


def _unpack_q5_1(blocks: Tensor) -> Tensor:
    """scale f16 | minimum f16 | 32 fifth bits | 16 bytes of nibbles; weight = scale * integer + minimum."""
    integers = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * integers.float() + _half(blocks, 2)


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    """scale f16 | 32 signed bytes; weight = scale * byte."""
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight six-bit scales and minima that Q4_K and Q5_K pack in 12 bytes, each float32 [blocks, 8, 1].

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits; bytes 8-11 hold the low four bits of scales
    (low nibble) and minima (high nibble) 4-7, whose top two bits are the top two bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=1)
    return scales.float().unsqueeze(-1), minima.float().unsqueeze(-1)


def _unpack_k(blocks: Tensor, integers: Tensor) -> Tensor:
    """scale f16 | minimum f16 | 12 bytes of sub-scales | ...; weight = (scale * s) * integer - minimum * m."""
    scales, minima = _k_scales(blocks[:, 4:16])
    step = _half(blocks, 0).unsqueeze(-1) * scales
    offset = _half(blocks, 2).unsqueeze(-1) * minima
    return step * integers.reshape(-1, 8, 32).float() - offset


def _unpack_q4_k(blocks: Tensor) -> Tensor:
    """... | 128 bytes of nibbles, in groups of 32 bytes."""
    return _unpack_k(blocks, _nibbles(blocks[:, 16:], 32))


def _unpack_q5_k(blocks: Tensor) -> Tensor:
    """... | 32 bytes of fifth bits (bit g of byte j belongs to weight 32 g + j) | 128 bytes of nibbles."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).reshape(1, 8, 1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts & 1).flatten(1)
    return _unpack_k(blocks, _nibbles(blocks[:, 48:], 32) | fifth << 4)


def _unpack_q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of nibbles, in groups of 64 | 64 bytes of top bit pairs, in groups of 32 | 16 int8 scales | scale f16.

    weight = (scale * sub-scale of its 16 weights) * (integer - 32).
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).reshape(1, 1, 4, 1)
    top = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).flatten(1)
    integers = _nibbles(blocks[:, :128], 64) | top << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().unsqueeze(-1)
    step = _half(blocks, 208).unsqueeze(-1) * scales
    return step * (integers.reshape(-1, 16, 16).float() - 32)


_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "Q6_K": _unpack_q6_k,
}
