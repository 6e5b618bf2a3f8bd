"""Activations in a packed form, handed by the op that makes them to the products that read them.

FP8 checkpoints with dynamic activations want one float32 scale for a token and 128 columns. Their products can quantise what
they read, which costs a kernel; an op that has the values in registers can write them so at once. In both cases the values
are rounded to the plain dtype first, so that where they are quantised changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firstlight.quant.format import PLAIN, Format, Packed, Weight
from firstlight.quant.layouts import Layout, register_layout

GROUP = 128
"""Columns that share a scale."""
TOKENS_TOGETHER = 16
"""cuBLASLt takes tokens in multiples (it refuses 257 and 1,030), and a column of scales then starts at a whole cache sector."""
LEAST = 1e-10
"""Least maximum of a group: a group of zeros has a scale, and its elements are zeros."""

LAYOUT_NAME = "scale_columns"
"""data [R, K] row-major, scale [R, K / 128] with the scales of a column side by side; R is T rounded up to 16, and rows from T
on hold anything."""
FLOAT8_BY_TOKEN = Format("float8_e4m3fn", (1, GROUP), "float32")
"""The scales of a token lie side by side: a thin product's program has all of them in its nearest cache from its first step on."""
FLOAT8_BY_COLUMN = FLOAT8_BY_TOKEN.with_layout(LAYOUT_NAME)
"""What cuBLASLt reads."""


@dataclass(frozen=True, slots=True)
class Emission:
    """How an op is asked to give its result: packed in `format`; with `plain` in its own dtype as well (`Packed.plain`)."""

    format: Format
    plain: bool


def empty_packed(shape: Sequence[int], form: Format, device: torch.device | str) -> Packed:
    """Room for a tensor [T, K], uninitialised, in `FLOAT8_BY_TOKEN` or `FLOAT8_BY_COLUMN`.

    Raises ValueError for another format, or columns that groups don't fill.
    """
    tokens, columns = shape
    if form not in (FLOAT8_BY_TOKEN, FLOAT8_BY_COLUMN) or columns % GROUP:
        raise ValueError(
            f"activations are packed as {FLOAT8_BY_TOKEN} in whole groups, not {columns} columns as {form}"
        )
    if form == FLOAT8_BY_TOKEN:
        data = torch.empty((tokens, columns), dtype=form.torch_dtype, device=device)
        scale = torch.empty((tokens, columns // GROUP), dtype=torch.float32, device=device)
        return Packed({"data": data, "scale": scale}, form, (tokens, columns))
    rows = -(-tokens // TOKENS_TOGETHER) * TOKENS_TOGETHER
    data = torch.empty((rows, columns), dtype=form.torch_dtype, device=device)
    scale = torch.empty_strided((rows, columns // GROUP), (1, rows), dtype=torch.float32, device=device)
    return Packed({"data": data, "scale": scale}, form, (tokens, columns))


def empty_result(like: Tensor, shape: Sequence[int], emit: Emission | None) -> Weight:
    """Room for what an op returns, of a shape and in the dtype of `like`, or as `emit` asks for a result [T, K]."""
    if emit is None:
        return like.new_empty(shape)
    packed = empty_packed(shape, emit.format, like.device)
    return replace(packed, plain=like.new_empty(shape)) if emit.plain else packed


def result_bytes(like: Tensor, shape: Sequence[int], emit: Emission | None) -> int:
    """Bytes of what `empty_result` makes room for, without the room behind the last token."""
    elements = math.prod(shape)
    if emit is None:
        return elements * like.element_size()
    return elements + elements // GROUP * 4 + (elements * like.element_size() if emit.plain else 0)


def emitted(x: Tensor, emit: Emission | None) -> Weight:
    """A plain result as `emit` asks for it."""
    if emit is None:
        return x
    packed = empty_packed(x.shape, emit.format, x.device) if x.is_meta else quantise(x, emit.format)
    return replace(packed, plain=x) if emit.plain else packed


def quantise(x: Tensor, form: Format) -> Packed:
    """[T, K] -> FP8 and scales: scale = max|group| / largest finite value. Raises what `empty_packed` does."""
    tokens = x.shape[0]
    packed = empty_packed(x.shape, form, x.device)
    limit = torch.finfo(form.torch_dtype).max
    groups = x.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1).clamp(min=LEAST) / limit
    packed.parts["data"][:tokens] = (groups / scale[..., None]).clamp(-limit, limit).flatten(1).to(form.torch_dtype)
    packed.parts["scale"][:tokens] = scale
    return packed


def concatenate_packed(pieces: Sequence[Packed]) -> Packed:
    """The tokens of several tensors [T, K] in one of the two formats, one after another."""
    first = pieces[0]
    columns = first.shape[1]
    tokens = sum(piece.shape[0] for piece in pieces)
    plain = None
    if first.plain is not None:
        kept = [piece.plain for piece in pieces if piece.plain is not None]
        plain = first.plain.new_empty((tokens, columns)) if first.plain.is_meta else torch.cat(kept)
    if first.parts["data"].is_meta:
        return replace(empty_packed((tokens, columns), first.format, first.device), plain=plain)
    parts = [(piece, piece.shape[0]) for piece in pieces]
    if first.format == FLOAT8_BY_TOKEN:
        scale = torch.cat([piece.parts["scale"] for piece in pieces])
    else:
        # Behind the last token may be any rows, as nobody reads what comes of them: the first of the largest piece serve.
        parts.append((max(pieces, key=lambda piece: piece.shape[0]), -tokens % TOKENS_TOGETHER))
        scale = torch.cat([piece.parts["scale"].t()[:, :count] for piece, count in parts], dim=1).t()
    data = torch.cat([piece.parts["data"].view(torch.uint8)[:count] for piece, count in parts])
    return Packed({"data": data.view(first.format.torch_dtype), "scale": scale}, first.format, (tokens, columns), plain)


def _pack(x: Weight) -> Packed:
    assert isinstance(x, Packed)
    packed = empty_packed(x.shape, x.format.with_layout(LAYOUT_NAME), x.device)
    for name, part in packed.parts.items():
        part[: x.shape[0]] = x.parts[name]
    return replace(packed, plain=x.plain)


def _unpack(x: Packed) -> Packed:
    parts = {name: part[: x.shape[0]].contiguous() for name, part in x.parts.items()}
    return Packed(parts, x.format.with_layout(PLAIN), x.shape, x.plain)


def _accepts(form: Format, shape: tuple[int, ...]) -> str | None:
    if form != FLOAT8_BY_TOKEN or len(shape) != 2 or shape[1] % GROUP:
        return f"arranges {FLOAT8_BY_TOKEN} of tokens with columns in whole groups, not {form} of {shape}"
    return None


def _nbytes(form: Format, shape: tuple[int, ...]) -> int:
    tokens, columns = shape
    return -(-tokens // TOKENS_TOGETHER) * TOKENS_TOGETHER * (columns + 4 * columns // GROUP)


register_layout(Layout(LAYOUT_NAME, _pack, _unpack, _accepts, _nbytes))
