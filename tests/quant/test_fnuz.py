"""e4m3 with the other bias: the same values, exactly."""

from __future__ import annotations

import pytest
import torch

from firstlight.quant import Packed, repack, unpack
from firstlight.quant.fnuz import E4M3FNUZ
from firstlight.quant.format import Format


def every_number() -> Packed:
    """A weight with all 256 bit patterns of e4m3fn."""
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    scale = torch.tensor([[0.5, 3.0], [1e-3, 0.75]], dtype=torch.bfloat16)
    return Packed({"data": data, "scale": scale}, Format("float8_e4m3fn", (8, 8), "bfloat16"), (16, 16))


def test_every_number_keeps_its_value():
    weight = every_number()
    converted = repack(weight, E4M3FNUZ.name)
    assert converted.parts["data"].dtype == torch.float8_e4m3fnuz
    # What the kernels compute: the other dtype's own value times the scale.
    scale = converted.parts["scale"].float().repeat_interleave(8, 0).repeat_interleave(8, 1)
    expected = unpack(weight, torch.float32)
    torch.testing.assert_close(converted.parts["data"].float() * scale, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(unpack(converted, torch.float32), expected, rtol=0, atol=0, equal_nan=True)


def test_bytes_are_those_of_the_parts():
    weight = every_number()
    assert E4M3FNUZ.nbytes(weight.format, (16, 16)) == repack(weight, E4M3FNUZ.name).nbytes


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match="converts float8_e4m3fn in scaled blocks, not bfloat16"):
        repack(torch.zeros(4, 4, dtype=torch.bfloat16), E4M3FNUZ.name)
