"""The mesh of ranks as data: any rank of any size can be described on one machine.

Axes, outermost first: pp (pipeline stages), dp (replicas of the attention part), cp (splits of one context), tp (splits of a
layer). Experts split over ep, which lies over the same ranks as dp x cp x tp. Process groups are attached when a run
starts (`groups.attach`); a host attaches its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that differ along one axis, as seen from one of them.

    size: how many; index: which one this is; handle: a torch.distributed process group, or None where nothing runs.
    """

    axis: str
    size: int = 1
    index: int = 0
    handle: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.index < self.size:
            raise ValueError(f"{self.axis} group: index {self.index} must be in [0, size={self.size})")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where this rank stands on every axis."""

    pp: Group = Group("pp")
    dp: Group = Group("dp")
    cp: Group = Group("cp")
    tp: Group = Group("tp")
    ep: Group = Group("ep")

    @classmethod
    def of(cls, rank: int = 0, *, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1) -> Mesh:
        """The mesh of the given sizes seen from `rank`. Raises ValueError if the sizes or the rank don't fit."""
        sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        total = pp * dp * cp * tp
        if not 0 <= rank < total:
            raise ValueError(f"rank {rank} is not in a mesh of {total} ranks (pp {pp} x dp {dp} x cp {cp} x tp {tp})")
        if (dp * cp * tp) % ep:
            raise ValueError(f"ep {ep} must divide dp x cp x tp = {dp * cp * tp}")
        groups, rest = {}, rank
        for axis in reversed(AXES):
            rest, index = divmod(rest, sizes[axis])
            groups[axis] = Group(axis, sizes[axis], index)
        return cls(**groups, ep=Group("ep", ep, rank % (dp * cp * tp) * ep // (dp * cp * tp)))

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.pp.size * self.dp.size * self.cp.size * self.tp.size
