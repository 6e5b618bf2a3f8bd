"""Activations packed in FP8: what a group's scale is, where it lies, and that nothing else changes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from firstlight.quant import (
    FLOAT8_BY_COLUMN,
    FLOAT8_BY_TOKEN,
    PLAIN,
    Emission,
    Packed,
    emitted,
    empty_result,
    repack,
    unpack,
)
from firstlight.quant.activations import concatenate_packed, quantise, result_bytes

PACKED, BOTH = Emission(FLOAT8_BY_COLUMN, plain=False), Emission(FLOAT8_BY_COLUMN, plain=True)


def tokens(count: int, columns: int = 256, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def stored(x: Packed) -> list[torch.Tensor]:
    """The tokens' values and scales, without the room behind them."""
    return [x.parts["data"][: x.shape[0]].view(torch.uint8), x.parts["scale"][: x.shape[0]]]


def test_a_group_by_hand():
    """1, -2 and 448 / 4 in a group whose largest is 112: scale 1/4, elements 4, -8 and 448. A group of zeros stays zeros."""
    x = torch.zeros(1, 256)
    x[0, :3] = torch.tensor([1.0, -2.0, 112.0])
    packed = quantise(x, FLOAT8_BY_COLUMN)
    assert packed.parts["scale"][0].tolist() == [0.25, pytest.approx(1e-10 / 448)]
    assert packed.parts["data"][0, :4].float().tolist() == [4.0, -8.0, 448.0, 0.0]
    assert torch.equal(unpack(packed, torch.float32), x)


@pytest.mark.parametrize("count", [0, 1, 16, 17])
def test_scales_of_a_column_are_neighbours_and_tokens_have_room_to_sixteen(count):
    packed = quantise(tokens(count), FLOAT8_BY_COLUMN)
    room = -(-count // 16) * 16
    assert packed.shape == (count, 256)
    assert packed.parts["data"].shape == (room, 256)
    assert packed.parts["scale"].shape == (room, 2)
    assert packed.parts["scale"].stride() == (1, room)
    x = tokens(count).float()
    assert ((unpack(packed, torch.float32) - x).abs() <= x.abs() / 16 + 1e-2).all()


@pytest.mark.parametrize("count", [0, 1, 17])
def test_scales_of_a_token_are_neighbours_in_the_other_form(count):
    packed, columnwise = quantise(tokens(count), FLOAT8_BY_TOKEN), quantise(tokens(count), FLOAT8_BY_COLUMN)
    assert packed.parts["scale"].shape == (count, 2)
    assert packed.parts["scale"].is_contiguous()
    assert packed.nbytes == count * (256 + 8)
    for ours, expected in zip(stored(packed), stored(columnwise), strict=True):
        assert torch.equal(ours, expected)
    assert torch.equal(unpack(packed, torch.float32), unpack(columnwise, torch.float32))


def test_layout_is_undone_exactly():
    packed = quantise(tokens(5), FLOAT8_BY_COLUMN)
    plain = repack(packed, PLAIN)
    assert plain.format == FLOAT8_BY_TOKEN
    assert plain.parts["scale"].is_contiguous()
    again = repack(plain, FLOAT8_BY_COLUMN.layout)
    for ours, expected in zip(stored(again), stored(packed), strict=True):
        assert torch.equal(ours, expected)
    with pytest.raises(ValueError, match="can't hold a bfloat16 weight"):
        repack(tokens(5), FLOAT8_BY_COLUMN.layout)


@pytest.mark.parametrize("counts", [(3, 0, 40), (16, 16), (1, 1), (0, 5)])
@pytest.mark.parametrize("emit", [PACKED, BOTH, Emission(FLOAT8_BY_TOKEN, plain=False)])
def test_tokens_put_together_are_those_of_the_whole(counts, emit):
    x = tokens(sum(counts))
    whole, pieces = emitted(x, emit), [emitted(part, emit) for part in x.split(counts)]
    together = concatenate_packed(pieces)
    for ours, expected in zip(stored(together), stored(whole), strict=True):
        assert torch.equal(ours, expected)
    for name, part in whole.parts.items():
        assert (together.parts[name].shape, together.parts[name].stride()) == (part.shape, part.stride())
    assert (together.plain is None) == (whole.plain is None)
    assert together.plain is None or torch.equal(together.plain, x)
    meta = concatenate_packed([emitted(part.to("meta"), emit) for part in x.split(counts)])
    assert meta.shape == together.shape
    assert {name: part.shape for name, part in meta.parts.items()} == {
        name: part.shape for name, part in together.parts.items()
    }


def test_room_and_bytes_of_a_result():
    x = tokens(32)
    assert empty_result(x, x.shape, None).shape == x.shape
    packed = empty_result(x, x.shape, PACKED)
    assert packed.plain is None
    assert packed.nbytes == result_bytes(x, x.shape, PACKED) == 32 * (256 + 8)
    both = empty_result(x, x.shape, BOTH)
    assert both.nbytes + both.plain.nbytes == result_bytes(x, x.shape, BOTH)
    assert result_bytes(x, x.shape, None) == x.nbytes


def test_what_cannot_be_packed_is_refused_with_figures():
    with pytest.raises(ValueError, match="in whole groups, not 200 columns"):
        quantise(tokens(2, 200), FLOAT8_BY_COLUMN)
    with pytest.raises(ValueError, match="not 256 columns as float8_e5m2"):
        quantise(tokens(2), replace(FLOAT8_BY_COLUMN, dtype="float8_e5m2"))
