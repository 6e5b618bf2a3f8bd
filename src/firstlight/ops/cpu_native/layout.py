"""How weights lie in memory for the native CPU kernels: tiles of 16 rows (see `linear.h`), and the way back.

bfloat16 weights are only rearranged. GGUF's block formats become 4- or 8-bit integers with a scale (and a minimum) for each
group of a row: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 keep their integers and float16 scales; the K formats keep their integers, and
the product of their two levels of scales in float32. Values are the same bit for bit. Five- and six-bit integers take a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.quant import Format, Layout, Packed, Weight, format_of, register_layout

LAYOUT_NAME = "cpu_tiles"
TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Integers:
    """A quantised matrix taken apart: value = scale * integer (+ minimum).

    integer: int8 [rows, columns]. scale, minimum: float16 or float32 [rows, columns / group]; minimum None: there is none.
    """

    integer: Tensor
    scale: Tensor
    minimum: Tensor | None

    @property
    def group(self) -> int:
        """Neighbouring columns that share a scale."""
        return self.integer.shape[1] // self.scale.shape[1]


@dataclass(frozen=True, slots=True)
class BlockKind:
    """How a GGUF block format is kept. bits: of an integer here. zero: what the 4-bit lookup subtracts."""

    bits: int
    zero: int
    group: int
    wide_scale: bool
    has_minimum: bool


KINDS: dict[str, BlockKind] = {
    "Q4_0": BlockKind(4, 8, 32, False, False),
    "Q4_1": BlockKind(4, 0, 32, False, True),
    "Q5_0": BlockKind(8, 0, 32, False, False),
    "Q5_1": BlockKind(8, 0, 32, False, True),
    "Q8_0": BlockKind(8, 0, 32, False, False),
    "Q4_K": BlockKind(4, 0, 32, True, True),
    "Q5_K": BlockKind(8, 0, 32, True, True),
    "Q6_K": BlockKind(8, 0, 16, True, False),
}


def pack(weight: Weight) -> Packed:
    """A plain bfloat16 matrix or raw GGUF blocks -> tiles. Parts: data, and for blocks scale and perhaps minimum."""
    form, shape = format_of(weight), tuple(weight.shape)
    if isinstance(weight, Tensor):
        return Packed({"data": to_tiles(weight, 2)}, form.with_layout(LAYOUT_NAME), shape)
    kind = KINDS[form.dtype]
    apart = take_apart(weight.parts["data"], form.dtype)
    parts = {"data": pack_integers(apart.integer, kind.bits), "scale": to_tiles(apart.scale).squeeze(-1)}
    if apart.minimum is not None:
        parts["minimum"] = to_tiles(apart.minimum).squeeze(-1)
    return Packed(parts, form.with_layout(LAYOUT_NAME), shape)


def unpack(weight: Packed) -> Tensor:
    """Tiles -> the bfloat16 matrix, or for blocks their values in float32."""
    rows, columns = weight.shape
    kind = KINDS.get(weight.format.dtype)
    if kind is None:
        return from_tiles(weight.parts["data"], rows, columns)
    integer = unpack_integers(weight.parts["data"], kind.bits, rows, columns)
    if kind.bits == 4:
        integer = integer - kind.zero
    groups = columns // kind.group

    def spread(part: Tensor) -> Tensor:
        return from_tiles(part.unsqueeze(-1), rows, groups).float().repeat_interleave(kind.group, dim=1)

    values = integer.float() * spread(weight.parts["scale"])
    return values + spread(weight.parts["minimum"]) if kind.has_minimum else values


def accepts(form: Format, shape: tuple[int, ...]) -> str | None:
    """None for matrices of bfloat16 or of a known block format."""
    if len(shape) != 2:
        return f"tiles hold matrices, and this has {len(shape)} dimensions"
    if form.block is not None or (form.dtype != "bfloat16" and form.dtype not in KINDS):
        return f"tiles hold bfloat16 and {', '.join(KINDS)}"
    return None


def nbytes(form: Format, shape: tuple[int, ...]) -> int:
    """Bytes of all parts, with the rows that fill the last tile."""
    rows, columns = math.ceil(shape[0] / TILE_ROWS) * TILE_ROWS, shape[1]
    kind = KINDS.get(form.dtype)
    if kind is None:
        return rows * math.ceil(columns / 2) * 2 * 2
    scale_bytes = (4 if kind.wide_scale else 2) * (2 if kind.has_minimum else 1)
    return rows * (columns * kind.bits // 8 + columns // kind.group * scale_bytes)


CPU_TILES = register_layout(Layout(LAYOUT_NAME, pack, unpack, accepts, nbytes))


def to_tiles(matrix: Tensor, columns: int = 1) -> Tensor:
    """[rows, n * columns] -> contiguous [tiles, n, 16, columns]; missing rows and columns are zeros."""
    rows, width = matrix.shape
    tiles, steps = -(-rows // TILE_ROWS), -(-width // columns)
    if (rows, width) != (tiles * TILE_ROWS, steps * columns):
        padded = matrix.new_zeros((tiles * TILE_ROWS, steps * columns))
        padded[:rows, :width] = matrix
        matrix = padded
    return matrix.view(tiles, TILE_ROWS, steps, columns).transpose(1, 2).contiguous()


def from_tiles(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `to_tiles`: [rows, columns]."""
    return tiles.transpose(1, 2).reshape(tiles.shape[0] * TILE_ROWS, -1)[:rows, :columns].contiguous()


def pack_integers(integer: Tensor, bits: int) -> Tensor:
    """int8 [rows, columns] -> int16 words [tiles, columns / (32 / bits), 16, 2]; 4-bit integers are given as 0 .. 15."""
    per_word = 16 // bits
    tiles = to_tiles(integer.view(torch.uint8), 2 * per_word)  # [tiles, steps, 16, 2 * per_word]
    places = tiles.unflatten(-1, (per_word, 2)).to(torch.int32)
    word = torch.zeros_like(places[..., 0, :])
    for place in range(per_word):
        word |= places[..., place, :] << (bits * place)
    return word.to(torch.int16)  # keeps the low 16 bits


def unpack_integers(words: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    """The inverse of `pack_integers`: int8 [rows, columns]."""
    per_word = 16 // bits
    mask = (1 << bits) - 1
    places = [(words.to(torch.int32) >> (bits * place)) & mask for place in range(per_word)]
    return from_tiles(torch.stack(places, -2).flatten(-2).to(torch.uint8), rows, columns).view(torch.int8)


def take_apart(raw: Tensor, ggml_type: str) -> Integers:
    """Integers, scales and minima of raw GGUF rows, uint8 [rows, bytes]. 4-bit integers come as 0 .. 15."""
    rows = raw.shape[0]
    reader = {
        "Q4_0": _q4,
        "Q4_1": _q4,
        "Q5_0": _q5,
        "Q5_1": _q5,
        "Q8_0": _q8,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
    integer, scale, minimum = reader[ggml_type](raw, KINDS[ggml_type].has_minimum)
    return Integers(
        integer.reshape(rows, -1), scale.reshape(rows, -1), None if minimum is None else minimum.reshape(rows, -1)
    )


Parts = tuple[Tensor, Tensor, Tensor | None]


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _low_high(packed: Tensor, group: int) -> Tensor:
    """Nibbles of each run of `group` bytes: the low ones, then the high ones."""
    grouped = packed.unflatten(1, (-1, 1, group))
    return torch.cat((grouped & 15, grouped >> 4), 2).flatten(1)


def _q4(raw: Tensor, has_minimum: bool) -> Parts:
    header = 4 if has_minimum else 2
    blocks = raw.reshape(-1, header + 16)
    integer = _low_high(blocks[:, header:], 16).view(torch.int8)
    return integer, _half(blocks, 0), _half(blocks, 2) if has_minimum else None


def _q5(raw: Tensor, has_minimum: bool) -> Parts:
    header = 4 if has_minimum else 2
    blocks = raw.reshape(-1, header + 20)
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    fifth = (blocks[:, header : header + 4, None] >> shifts & 1).flatten(1)
    integer = (_low_high(blocks[:, header + 4 :], 16) | fifth << 4).view(torch.int8)
    return (integer, _half(blocks, 0), _half(blocks, 2)) if has_minimum else (integer - 16, _half(blocks, 0), None)


def _q8(raw: Tensor, has_minimum: bool) -> Parts:
    blocks = raw.reshape(-1, 34)
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [blocks, 8] scales and minima: a float16 of the block times six-bit integers in bytes 4 .. 15."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((first & 63, third & 15 | first >> 2 & 48), 1).float() * _half(blocks, 0).float()
    minimum = torch.cat((second & 63, third >> 4 | second >> 2 & 48), 1).float() * _half(blocks, 2).float()
    return scale, -minimum


def _q4_k(raw: Tensor, has_minimum: bool) -> Parts:
    blocks = raw.reshape(-1, 144)
    return _low_high(blocks[:, 16:], 32).view(torch.int8), *_k_scales(blocks)


def _q5_k(raw: Tensor, has_minimum: bool) -> Parts:
    blocks = raw.reshape(-1, 176)
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    fifth = (blocks[:, None, 16:48] >> shifts & 1).flatten(1)
    return (_low_high(blocks[:, 48:], 32) | fifth << 4).view(torch.int8), *_k_scales(blocks)


def _q6_k(raw: Tensor, has_minimum: bool) -> Parts:
    blocks = raw.reshape(-1, 210)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    top = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3).flatten(1)
    integer = (_low_high(blocks[:, :128], 64) | top << 4).view(torch.int8) - 32
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208).float()
    return integer, scale, None
