"""What a kernel takes in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.predict.kernels import Kernel
from firstlight.predict.shape import Numbers


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel in a step. All figures are totals over its `count`, seconds, bytes and operations; arrays over the shapes.

    bound: what the floor is made of: "memory", "compute" or "link". spread: standard deviation of ln(seconds).
    """

    kernel: Kernel
    seconds: Numbers
    floor: Numbers
    flops: Numbers
    moved: Numbers
    bound: Sequence[str]
    origin: str
    spread: float
    source: str
