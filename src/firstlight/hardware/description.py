"""What a piece of hardware can do at most. Peaks are datasheet figures; efficiencies live with (op, provider) elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device, as a provider's `when` and the predictor see it.

    kind: "cpu", "cuda" or "hip". architecture: "sm_90", "gfx942", or a CPU's instruction sets joined by "+".
    peak: operations a second by dtype of the multiply. bandwidth: bytes a second of device memory.
    memory: bytes. multiprocessors: SMs, CUs or cores. features: switches that a provider may ask for.
    """

    name: str
    kind: str
    architecture: str
    peak: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 0.0
    memory: int = 0
    multiprocessors: int = 1
    l2: int = 0
    features: frozenset[str] = frozenset()

    def has(self, feature: str) -> bool:
        """Whether a named feature (an instruction set on a CPU, "compiler", ...) is there."""
        return feature in self.features


# Source: NVIDIA H200 datasheet (SXM): dense peaks without sparsity, HBM3e 4.8 TB/s, 141 GB.
H200 = Hardware(
    name="NVIDIA H200",
    kind="cuda",
    architecture="sm_90",
    peak={"float8_e4m3fn": 1979e12, "bfloat16": 989e12, "float16": 989e12, "tf32": 495e12, "float32": 67e12},
    bandwidth=4.8e12,
    memory=141_000_000_000,
    multiprocessors=132,
    l2=60 * 2**20,
)

CPU_GENERIC = Hardware(name="CPU", kind="cpu", architecture="x86-64")

GPUS = {"h200": H200}
"""Described GPUs, by the name that options use."""
