"""Random weights for any config: the shapes, formats and statistics of a checkpoint, without one.

They are stored tensors like any other, drawn when they are asked for, on the device, from a generator keyed by (seed, name).
So they go through the same loader, and rank r of n gets exactly its part of what one rank would get.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from firstlight.nn.module import Module, WeightSpec
from firstlight.quant import SCALE_SUFFIX
from firstlight.quant.blocks import scale_shape
from firstlight.weights.stored import Range, StoredTensor

BRANCH = 1 / 16
"""What a branch adds to the residual is scaled by this much: so tokens stay apart through all layers, as they do in trained
models, and a router spreads them over its experts. At full scale what all tokens have in common would choose for all."""
FP8_STD = 64.0
"""Standard deviation of random FP8 elements: well inside e4m3's range (448) and far above its smallest steps."""


SCALES = {"linear": 1.0, "branch": BRANCH, "embedding": 1.0}
"""Of normally distributed weights, by `WeightSpec.init`."""


class RandomTensor(StoredTensor):
    """A tensor that is drawn when it is loaded."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, init: str, seed: int, device: torch.device | str
    ) -> None:
        super().__init__(name, shape, dtype, torch.Size(shape).numel() * dtype.itemsize, Path("random"))
        self.init, self.seed, self.device = init, seed, device

    def load_slice(self, ranges: Sequence[Range] | None) -> torch.Tensor:
        """The part of the values within `ranges`; the whole tensor is drawn first, so that parts agree."""
        # Hashed, so that the lower 32 bits, all that a CPU's generator reads, depend on both.
        key = hashlib.blake2b(f"{self.seed} {self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(key))
        values = self._draw(generator)
        return values[tuple(slice(start, stop) for start, stop in self.full_ranges(ranges))]

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        """Statistics that keep activations near 1: products keep the scale of their input, norms are near identity."""
        shape, device = self.shape, self.device
        if self.init in SCALES and self.dtype.itemsize > 1:
            half = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
            values = torch.randn(shape, generator=generator, device=device, dtype=half)
            return (values * (SCALES[self.init] * (1.0 if self.init == "embedding" else shape[-1] ** -0.5))).to(
                self.dtype
            )
        if self.init in SCALES:
            return torch.randn(shape, generator=generator, device=device).mul_(FP8_STD).clamp_(-448, 448).to(self.dtype)
        if self.init == "scale":
            return torch.full(shape, 1.0, device=device, dtype=self.dtype)
        uniform = torch.rand(shape, generator=generator, device=device)
        if self.init == "decay":  # A_log: log of a decay rate between 1 and 16, as published models start from
            return (1 + 15 * uniform).log().to(self.dtype)
        if self.init == "step":  # dt_bias: softplus of it lies between about 0.001 and 0.1
            return (uniform * 4.6 - 6.9).to(self.dtype)
        return ((1.0 if self.init == "ones" else 0.0) + 0.1 * (uniform - 0.5)).to(self.dtype)


class RandomScale(RandomTensor):
    """Scales of a random FP8 weight: one value that gives the product the scale of its input."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        init: str,
        columns: int,
        device: torch.device | str,
    ) -> None:
        super().__init__(name, shape, dtype, "scale", 0, device)
        self.value = SCALES[init] * columns**-0.5 / FP8_STD

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.full(self.shape, self.value, device=self.device, dtype=self.dtype)


def random_tensors(model: torch.nn.Module, seed: int, device: torch.device | str) -> dict[str, StoredTensor]:
    """Random tensors for every declared weight of a model, by name."""
    tensors: dict[str, StoredTensor] = {}
    for module in model.modules():
        if isinstance(module, Module):
            for spec in module.weight_specs.values():
                for tensor in _stored(spec, seed, device):
                    tensors[tensor.name] = tensor
    return tensors


def _stored(spec: WeightSpec, seed: int, device: torch.device | str) -> list[StoredTensor]:
    """What a checkpoint would hold for a weight; stacks of experts in their fused form, which is one draw."""
    form = spec.forms[-1] if spec.experts is not None else spec.forms[0]
    sizes: dict[str, int] = {}
    for segment in form:
        sizes[segment.source] = max(sizes.get(segment.source, 0), segment.end)
    stored: list[StoredTensor] = []
    for source, size in sizes.items():
        shape = tuple(size if i == spec.axis else n for i, n in enumerate(spec.shape))
        dtype = torch.float32 if spec.format.dtype not in vars(torch) else spec.format.torch_dtype
        stored.append(RandomTensor(source, shape, dtype, spec.init, seed, device))
        if spec.format.block is not None and spec.format.scale_dtype is not None:
            scale = scale_shape(shape, spec.format.block)
            scale_dtype = getattr(torch, spec.format.scale_dtype)
            stored.append(RandomScale(source + SCALE_SUFFIX, scale, scale_dtype, spec.init, shape[-1], device))
    return stored
