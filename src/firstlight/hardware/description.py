"""What a piece of hardware can do at most. Peaks are datasheet figures; efficiencies live with (op, provider) elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Link:
    """How a device talks to others.

    bandwidth: bytes a second in one direction, at most. latency: seconds from a kernel's store to the other side's load.
    reach: how many devices it connects, this one included.
    """

    bandwidth: float
    latency: float
    reach: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device, as a provider's `when` and the predictor see it.

    kind: "cpu", "cuda" or "hip". architecture: "sm_90", "gfx942", or a CPU's instruction sets joined by "+".
    peak: operations a second by dtype of the multiply. bandwidth: bytes a second of device memory.
    memory: bytes. multiprocessors: SMs, CUs or cores. features: switches that a provider may ask for.
    links: from the nearest to the farthest (inside a server or rack, then between them). dollars_per_hour: rent of one
    device, 0 if no price is known. source: where the figures were published.
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
    links: tuple[Link, ...] = ()
    dollars_per_hour: float = 0.0
    source: str = ""

    def has(self, feature: str) -> bool:
        """Whether a named feature (an instruction set on a CPU, "compiler", ...) is there."""
        return feature in self.features


CPU_GENERIC = Hardware(name="CPU", kind="cpu", architecture="x86-64")
