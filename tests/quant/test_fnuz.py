"""e4m3 with the other bias: the same values, exactly."""

from __future__ import annotations

import math

import pytest
import torch

from firstlight.quant import WHOLE_ROW, Packed, repack, unpack
from firstlight.quant.blocks import expand_scale, scale_shape
from firstlight.quant.fnuz import E4M3FNUZ
from firstlight.quant.format import Format


def every_number(block: tuple[int, int]) -> Packed:
    """A weight with all 256 bit patterns of e4m3fn."""
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    scale = torch.tensor([0.5, 3.0, 1e-3, 0.75], dtype=torch.bfloat16)
    scale = scale.repeat(4)[: math.prod(scale_shape((16, 16), block))].reshape(scale_shape((16, 16), block))
    return Packed({"data": data, "scale": scale}, Format("float8_e4m3fn", block, "bfloat16"), (16, 16))


BLOCKS = pytest.mark.parametrize("block", [(8, 8), (1, WHOLE_ROW)], ids=["blocks", "rows"])


@BLOCKS
def test_every_number_keeps_its_value(block):
    weight = every_number(block)
    converted = repack(weight, E4M3FNUZ.name)
    assert converted.parts["data"].dtype == torch.float8_e4m3fnuz
    # What the kernels compute: the other dtype's own value times the scale.
    scale = expand_scale(converted.parts["scale"].float(), weight.shape, block)
    expected = unpack(weight, torch.float32)
    torch.testing.assert_close(converted.parts["data"].float() * scale, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(unpack(converted, torch.float32), expected, rtol=0, atol=0, equal_nan=True)


@BLOCKS
def test_bytes_are_those_of_the_parts(block):
    weight = every_number(block)
    assert E4M3FNUZ.nbytes(weight.format, (16, 16)) == repack(weight, E4M3FNUZ.name).nbytes


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match="converts float8_e4m3fn in scaled blocks, not bfloat16"):
        repack(torch.zeros(4, 4, dtype=torch.bfloat16), E4M3FNUZ.name)
