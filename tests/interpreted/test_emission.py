"""What ops give packed, under the interpreter: the bits that their plain results quantise to."""

from __future__ import annotations

import pytest
import torch
from emission_checks import (
    EMITTED,
    FORMS,
    check_emitted_gated_delta,
    check_emitted_rows,
    check_packed_product,
)

from firstlight.ops.gated_delta import triton_chunked, triton_decode
from firstlight.ops.linear import triton_block_fp8
from firstlight.quant import Emission

EVERY_FORM = pytest.mark.parametrize("emit", EMITTED, ids=["packed alone", "and plain", "by token"])


@EVERY_FORM
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "columns"), [(2, 128), (17, 384), (3, 1152), (1, 2048)])
def test_rows(tokens: int, columns: int, dtype: torch.dtype, emit: Emission) -> None:
    check_emitted_rows("cpu", dtype, tokens, columns, emit)


@EVERY_FORM
@pytest.mark.parametrize("norm", [True, False], ids=["by the last program", "by a kernel"])
def test_decode(norm: bool, emit: Emission) -> None:
    tiles = triton_decode.Tiles(64, 1, norm=norm)
    check_emitted_gated_delta(triton_decode.run, emit, [1, 1, 1], "cpu", torch.float16, tiles=tiles)


@EVERY_FORM
def test_prefill(emit: Emission) -> None:
    cut = triton_chunked.Cut(64, 4, 1)
    check_emitted_gated_delta(triton_chunked.run, emit, [5, 66], "cpu", torch.float16, cut=cut)


@pytest.mark.parametrize(("tokens", "columns"), [(5, 1024), (19, 256), (67, 128)])
def test_products_of_packed_activations(tokens: int, columns: int) -> None:
    check_packed_product(triton_block_fp8.run, FORMS, "cpu", torch.float16, tokens, 150, columns, bias=True)
