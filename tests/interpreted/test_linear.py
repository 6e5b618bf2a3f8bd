"""linear under the interpreter. Its cast to FP8 rounds some numbers to half their value, hence the wide tolerance there."""

from __future__ import annotations

import pytest
import torch
from product_checks import check_linear, draw, exactly, fp8, relative_error, strided
from torch import Tensor

from firstlight.ops.linear import torch_row_fp8, triton_block_fp8, triton_row_fp8, triton_skinny
from firstlight.quant import WHOLE_ROW, Weight

INTERPRETED_FP8 = 0.3


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_skinny_fp8(tokens: int) -> None:
    check_linear(triton_skinny.run, "cpu", torch.float16, tokens, 130, 200, 1e-3, bias=tokens == 1)


def test_skinny_with_blocks_of_a_shard() -> None:
    check_linear(triton_skinny.run, "cpu", torch.float16, 1, 48, 96, 1e-3, block=(16, 32), result=torch.float32)


@pytest.mark.parametrize(("tokens", "block_k"), [(1, 128), (2, 64)])
def test_skinny_in_steps_that_do_not_fill_the_columns(tokens: int, block_k: int) -> None:
    def run(x: Tensor, weight: Weight, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        from firstlight.ops.linear.triton_skinny_kernels import product

        return product(x, weight, bias, dtype or x.dtype, block_k=block_k)

    check_linear(run, "cpu", torch.float16, tokens, 20, 200, 1e-3)


@pytest.mark.parametrize("tokens", [1, 3])
def test_skinny_by_row(tokens: int) -> None:
    check_linear(triton_skinny.run, "cpu", torch.float16, tokens, 130, 200, 1e-3, block=(1, WHOLE_ROW), bias=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_skinny_plain(dtype: torch.dtype) -> None:
    check_linear(triton_skinny.run, "cpu", dtype, 4, 33, 77, 1e-3, block=None)


@pytest.mark.parametrize(("tokens", "columns"), [(5, 1024), (19, 256), (67, 128)])
def test_block_fp8(tokens: int, columns: int) -> None:
    check_linear(triton_block_fp8.run, "cpu", torch.float16, tokens, 150, columns, INTERPRETED_FP8, bias=True)


@pytest.mark.parametrize(("tokens", "columns"), [(5, 1024), (19, 256), (67, 128)])
def test_row_fp8(tokens: int, columns: int) -> None:
    check_linear(
        triton_row_fp8.run, "cpu", torch.float16, tokens, 150, columns, INTERPRETED_FP8, block=(1, WHOLE_ROW), bias=True
    )


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(2, 1, 128), (5, 3, 2048), (33, 129, 384), (130, 3, 128)])
def test_row_fp8_adds_nothing_to_its_quantisation(tokens: int, rows: int, columns: int) -> None:
    """The exact product of what the activations became, whatever the cast to FP8 made of them."""
    from firstlight.ops.linear.triton_quantise import quantised_rows

    x = strided(draw(tokens, columns, dtype=torch.float16, device="cpu"))
    weight = fp8(draw(rows, columns, dtype=torch.float32, device="cpu"), (1, WHOLE_ROW))
    data, scale = quantised_rows(x, torch.float8_e4m3fn)
    assert torch.allclose(scale[:, 0], x.float().abs().amax(1) / 448, rtol=1e-6)
    expected = data.double() * scale.double() @ exactly(weight).T
    assert relative_error(triton_row_fp8.run(x, weight, dtype=torch.float32), expected) < 1e-6


def test_torch_row_fp8() -> None:
    check_linear(torch_row_fp8.run, "cpu", torch.bfloat16, 33, 160, 256, INTERPRETED_FP8, block=(1, WHOLE_ROW))
