"""Checks that what an op gives packed is what a product makes of its plain result.

Under the interpreter bit for bit. On a GPU a kernel that packs is compiled apart from the plain one, and may add a row's squares up in
another order, so that here and there a result is rounded the other way: packed values are then those of the kernel's own plain
results, bit for bit, and those differ from the plain kernel's by a unit in the last place at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from product_checks import draw, fp8, strided
from torch import Tensor
from triton_mixers import gated_delta_inputs

from firstlight.ops.op import REGISTRY
from firstlight.quant import FLOAT8_BY_COLUMN, FLOAT8_BY_TOKEN, Emission, Format, Packed

FORMS = (FLOAT8_BY_TOKEN, FLOAT8_BY_COLUMN)
EMITTED = [
    Emission(FLOAT8_BY_COLUMN, plain=False),
    Emission(FLOAT8_BY_COLUMN, plain=True),
    Emission(FLOAT8_BY_TOKEN, plain=False),
]


def assert_quantised(packed: Any, plain: Tensor, rows: slice = slice(None)) -> None:
    """Values and scales of `packed` are those that the products' own kernel makes of `plain`; rows: of its tokens."""
    from firstlight.ops.linear.triton_quantise import quantised_tokens

    assert isinstance(packed, Packed)
    expected = quantised_tokens(plain, packed.format)
    assert packed.shape == expected.shape == tuple(plain.shape)
    for name, part in expected.parts.items():
        ours = packed.parts[name]
        assert (ours.shape, ours.stride(), ours.dtype) == (part.shape, part.stride(), part.dtype), name
        ours, part = ours[: len(plain)][rows], part[: len(plain)][rows]
        if name == "data":
            ours, part = ours.view(torch.uint8), part.view(torch.uint8)
        different = (ours != part).nonzero()
        assert not len(different), f"{name} differs first at {different[0].tolist()}, {len(different)} times"


LAST_PLACE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""A unit in the last place, relative to the smallest number that has it."""
ROUNDED_OTHERWISE = 1e-3
"""The share of values that may be."""


def assert_same(packed: Any, plain: Tensor, emit: Emission, rows: slice = slice(None)) -> None:
    """A packed result against the plain kernel's; rows: of its tokens."""
    assert packed.format == emit.format
    assert (packed.plain is not None) == emit.plain
    if not plain.is_cuda:
        assert_quantised(packed, plain, rows)
        assert packed.plain is None or torch.equal(packed.plain[rows], plain[rows])
    elif packed.plain is not None:
        assert_quantised(packed, packed.plain, rows)
        torch.testing.assert_close(packed.plain[rows], plain[rows], rtol=LAST_PLACE[plain.dtype], atol=1e-30)
    else:
        assert_nearly_quantised(packed, plain, rows)


def assert_nearly_quantised(packed: Any, plain: Tensor, rows: slice) -> None:
    """Codes are those of the plain values but for a few, and all stand for the plain values as nearly as e4m3 can."""
    from firstlight.ops.linear.triton_quantise import quantised_tokens

    codes, expected = (
        x.parts["data"][: len(plain)][rows].view(torch.uint8) for x in (packed, quantised_tokens(plain, packed.format))
    )
    assert (codes != expected).double().mean() <= ROUNDED_OTHERWISE
    wide = plain[rows].double()
    scale = packed.parts["scale"][: len(plain)][rows].double().repeat_interleave(128, 1)
    values = packed.parts["data"][: len(plain)][rows].double() * scale
    bound = (2**-4 + LAST_PLACE[plain.dtype]) * wide.abs() + 2**-10 * scale
    assert ((values - wide).abs() <= bound).all()


def assert_emitted(run: Any, emit: Emission, *args: Any, **kwargs: Any) -> None:
    """A provider's result, asked for packed, against what it gives otherwise; other results (a sum) are the same."""
    plain, packed = run(*args, **kwargs), run(*args, **kwargs, emit=emit)
    if isinstance(plain, tuple):
        for ours, expected in zip(packed[1:], plain[1:], strict=True):
            assert torch.equal(ours, expected)
        plain, packed = plain[0], packed[0]
    assert_same(packed, plain, emit)


def check_emitted_rows(device: str, dtype: torch.dtype, tokens: int, columns: int, emit: Emission) -> None:
    """Norms and gates, one row of zeros and one of large numbers among the tokens."""
    runs = {
        name: REGISTRY[name].providers["triton_fused"].run
        for name in ("rms_norm", "add_rms_norm", "silu_mul", "sigmoid_mul")
    }

    def rows(width: int) -> Tensor:
        x = strided(draw(tokens, width, dtype=dtype, device=device))
        x[0] = 0
        x[-1] *= 100
        return x

    weight = draw(columns, dtype=dtype, device=device)
    x, y = rows(columns), rows(columns)
    for zero_centred in (False, True):
        assert_emitted(runs["rms_norm"], emit, x, weight, eps=1e-6, zero_centred=zero_centred)
        assert_emitted(runs["add_rms_norm"], emit, x, y, weight, eps=1e-6, zero_centred=zero_centred)
    assert_emitted(runs["silu_mul"], emit, rows(2 * columns))
    assert_emitted(runs["sigmoid_mul"], emit, x, y)
    assert_emitted(runs["sigmoid_mul"], emit, x, draw(tokens, 1, dtype=dtype, device=device))


def check_emitted_gated_delta(
    run: Any, emit: Emission, counts: list[int], device: str, dtype: torch.dtype, **options: Any
) -> None:
    """A provider of `gated_delta`, with heads of 128 values; padding behind the last request's tokens is left out."""
    slots = list(range(1, len(counts) + 1))
    key_dim = options.pop("key_dim", 16)
    args, kwargs = gated_delta_inputs(
        counts, slots, slots, key_heads=1, value_heads=3, key_dim=key_dim, value_dim=128, dtype=dtype, device=device
    )
    results = []
    for asked in ({}, {"emit": emit}):
        copies = tuple(x.clone() if i in (8, 9) else x for i, x in enumerate(args))
        results.append(run(*copies, **kwargs, **options, **asked))
    plain, packed = results
    assert_same(packed, plain, emit, slice(sum(counts)))


def check_packed_product(
    run: Any,
    forms: Sequence[Format],
    device: str,
    dtype: torch.dtype,
    tokens: int,
    rows: int,
    columns: int,
    bias: bool = False,
) -> None:
    """A product of activations packed in either form is that of plain ones, which it quantises itself."""
    from firstlight.ops.linear.triton_quantise import quantised_tokens

    x = draw(tokens, columns, dtype=dtype, device=device)
    weight = fp8(draw(rows, columns, dtype=dtype, device=device, scale=columns**-0.5))
    added = draw(rows, dtype=dtype, device=device) if bias else None
    expected = run(x, weight, added)
    for form in forms:
        actual = run(quantised_tokens(x, form), weight, added, dtype=dtype)
        assert actual.shape == expected.shape
        assert torch.equal(actual, expected)
