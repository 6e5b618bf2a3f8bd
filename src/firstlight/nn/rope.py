"""Rotary position embeddings: which frequencies a config asks for, and the angles of a step's positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from firstlight.nn.module import Build, Module
from firstlight.ops.op import CallSite
from firstlight.ops.rope_angles import rope_angles
from firstlight.step import StepBatch


@dataclass(frozen=True, slots=True)
class Rope:
    """What a config says of rotary embeddings.

    dim: how many of a head's dimensions rotate. kind: "default", "linear", "llama3" or "yarn". sections: how many
    frequencies each of the three position rows of interleaved MRoPE has, or None. Formulas: "RoFormer" (Su et al. 2021),
    "YaRN" (Peng et al. 2023), and the published Llama 3.1 scaling.
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    sections: tuple[int, int, int] | None = None

    def frequencies(self) -> torch.Tensor:
        """[dim / 2] float32, radians a position."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        inverse = 1.0 / (self.theta**exponent)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "llama3":
            return self._llama3(inverse)
        if self.kind == "yarn":
            return self._yarn(inverse)
        return inverse

    def _llama3(self, inverse: torch.Tensor) -> torch.Tensor:
        wavelength = 2 * math.pi / inverse
        low, high = self.original_context / self.low_freq_factor, self.original_context / self.high_freq_factor
        smooth = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * inverse / self.factor + smooth * inverse
        scaled = torch.where(wavelength > low, inverse / self.factor, inverse)
        return torch.where((wavelength <= low) & (wavelength >= high), between, scaled)

    def _yarn(self, inverse: torch.Tensor) -> torch.Tensor:
        def dimension(rotations: float) -> float:
            return self.dim * math.log(self.original_context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        ramp = ((torch.arange(self.dim // 2).float() - first) / max(last - first, 0.001)).clamp(0, 1)
        return inverse / self.factor * ramp + inverse * (1 - ramp)

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by (YaRN's attention factor)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


class RotaryAngles(Module):
    """positions [T] or [3, T] -> cos | sin, [T, dim] float32, once a step for all layers."""

    def __init__(self, build: Build, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self.frequencies = rope.frequencies()
        self.angles = CallSite(rope_angles)

    def forward(self, step: StepBatch) -> torch.Tensor:
        """The angles of this step's positions."""
        if self.frequencies.device != step.positions.device:
            self.frequencies = self.rope.frequencies().to(step.positions.device)
        return self.angles[step.bucket.index](
            step.positions, self.frequencies, sections=self.rope.sections, factor=self.rope.magnitude
        )
