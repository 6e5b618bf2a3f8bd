"""Checks that what an op gives packed is, bit for bit, what a product makes of its plain result. On a GPU, or interpreted."""

from __future__ import annotations

from typing import Any

import torch
from product_checks import draw, fp8, strided
from torch import Tensor
from triton_mixers import gated_delta_inputs

from firstlight.ops.op import REGISTRY
from firstlight.quant import FLOAT8_TOKENS, Emission, Packed

EMITTED = [Emission(FLOAT8_TOKENS, plain=False), Emission(FLOAT8_TOKENS, plain=True)]


def assert_quantised(packed: Any, plain: Tensor, rows: slice = slice(None)) -> None:
    """Values and scales of `packed` are those that the products' own kernel makes of `plain`; rows: of its tokens."""
    from firstlight.ops.linear.triton_quantise import quantised_tokens

    assert isinstance(packed, Packed)
    expected = quantised_tokens(plain)
    assert packed.format == expected.format == FLOAT8_TOKENS
    assert packed.shape == expected.shape == tuple(plain.shape)
    for name, part in expected.parts.items():
        ours = packed.parts[name]
        assert (ours.shape, ours.stride(), ours.dtype) == (part.shape, part.stride(), part.dtype), name
        ours, part = ours[: len(plain)][rows], part[: len(plain)][rows]
        if name == "data":
            ours, part = ours.view(torch.uint8), part.view(torch.uint8)
        different = (ours != part).nonzero()
        assert not len(different), f"{name} differs first at {different[0].tolist()}, {len(different)} times"


def assert_emitted(run: Any, emit: Emission, *args: Any, **kwargs: Any) -> None:
    """A provider's result, asked for packed, against what it gives otherwise; other results (a sum) are the same."""
    plain, packed = run(*args, **kwargs), run(*args, **kwargs, emit=emit)
    if isinstance(plain, tuple):
        for ours, expected in zip(packed[1:], plain[1:], strict=True):
            assert torch.equal(ours, expected)
        plain, packed = plain[0], packed[0]
    assert_quantised(packed, plain)
    assert (packed.plain is not None) == emit.plain
    if packed.plain is not None:
        assert torch.equal(packed.plain, plain)


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
    real = slice(sum(counts))
    assert_quantised(packed, plain, real)
    assert (packed.plain is not None) == emit.plain
    if packed.plain is not None:
        assert torch.equal(packed.plain[real], plain[real])


def check_packed_product(
    run: Any, device: str, dtype: torch.dtype, tokens: int, rows: int, columns: int, bias: bool = False
) -> None:
    """A product of packed activations is that of plain ones, which it quantises itself."""
    from firstlight.ops.linear.triton_quantise import quantised_tokens

    x = draw(tokens, columns, dtype=dtype, device=device)
    weight = fp8(draw(rows, columns, dtype=dtype, device=device, scale=columns**-0.5))
    added = draw(rows, dtype=dtype, device=device) if bias else None
    expected = run(x, weight, added)
    actual = run(quantised_tokens(x), weight, added, dtype=dtype)
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected)
