"""Checks of Triton providers against the references, on a GPU or, under Triton's interpreter, on the CPU.

Inputs are fresh on every run and their seed is printed. What must not be read is NaN: padding rows, experts that nobody
chose, columns between strided rows.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from firstlight.ops.op import REGISTRY
from firstlight.quant import Packed, Weight, unpack
from firstlight.quant.blocks import pack_blocks


def draw(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    """Normal numbers from a fresh seed, which is printed."""
    seed = random.randrange(2**31)
    print(f"seed {seed} for {shape}")
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(device)


def strided(x: Tensor, gap: int = 3) -> Tensor:
    """The same rows with NaN between them."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + gap), torch.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def fp8(weight: Tensor, block: tuple[int, int] = (128, 128)) -> Packed:
    """A weight as FP8 checkpoints store it."""
    return pack_blocks(weight.float(), block, torch.float8_e4m3fn, torch.bfloat16)


def exactly(value: Any) -> Any:
    """Tensors and packed weights on the CPU, in float64."""
    if isinstance(value, Packed):
        parts = {name: part.cpu() for name, part in value.parts.items()}
        return unpack(replace(value, parts=parts), torch.float32).double()
    if isinstance(value, Tensor):
        return value.cpu().double() if value.is_floating_point() else value.cpu()
    return value


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The worst row's RMS error over the RMS of all."""
    assert not actual.isnan().any(), "NaN in the result"
    error = (actual.cpu().double() - expected).square().flatten(0, -2).mean(-1).sqrt().max()
    ratio = float(error / expected.square().mean().sqrt().clamp(min=1e-30))
    print(f"worst row's error over the answer's RMS: {ratio:.2e}")
    return ratio


def assert_matches(op: str, run: Any, tolerance: float, *args: Any, **kwargs: Any) -> None:
    """A provider's result against the reference's in float64, as a share of the answer's RMS."""
    expected = REGISTRY[op].reference(*map(exactly, args), **{key: exactly(value) for key, value in kwargs.items()})
    actual = run(*args, **kwargs)
    if isinstance(expected, Tensor):
        expected, actual = (expected,), (actual,)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        if not other.is_floating_point():
            assert torch.equal(one.cpu(), other)
            continue
        assert relative_error(one, other) < tolerance


def routed(tokens: int, experts: int, top_k: int, device: str, padding: int = 0) -> tuple[Tensor, Tensor]:
    """(weights, distinct experts) of each token; the last `padding` tokens have expert -1 and weight 0."""
    seed = random.randrange(2**31)
    print(f"seed {seed} for the routing of {tokens} tokens")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.int()
    weights = torch.rand(tokens, top_k, generator=generator).softmax(-1)
    if padding:
        chosen[-padding:], weights[-padding:] = -1, 0
    return weights.to(device), chosen.to(device)


def poisoned(weight: Weight, chosen: Tensor, first_expert: int) -> Weight:
    """Experts that nobody chose become NaN."""
    used = torch.zeros(weight.shape[0], dtype=torch.bool)
    local = chosen.cpu().flatten().long() - first_expert
    used[local[(local >= 0) & (local < len(used))]] = True
    if isinstance(weight, Packed):
        scale = weight.parts["scale"].clone()
        scale[~used.to(scale.device)] = torch.nan
        return replace(weight, parts={**weight.parts, "scale": scale})
    weight = weight.clone()
    weight[~used.to(weight.device)] = torch.nan
    return weight
