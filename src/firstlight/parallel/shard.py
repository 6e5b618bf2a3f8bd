"""How a dimension splits over a group of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.errors import InputError
from firstlight.parallel.mesh import Group


@dataclass(frozen=True, slots=True)
class Share:
    """The range [start, stop) of a dimension that a rank holds; `copies` ranks hold the same range."""

    start: int
    stop: int
    copies: int = 1

    @property
    def size(self) -> int:
        """Elements held."""
        return self.stop - self.start


def share(size: int, unit: int, group: Group, what: str, replicate: bool = False) -> Share:
    """What this rank holds of `size` elements that split only between runs of `unit` elements (a head, a block).

    With `replicate`, fewer units than ranks are held by several ranks each (KV heads).
    Raises InputError, naming `what`, if the units can't be dealt out evenly.
    """
    units = size // unit
    if units * unit != size:
        raise InputError(f"{what}: {size} elements are not a multiple of {unit}")
    if units % group.size == 0:
        count = units // group.size * unit
        return Share(group.index * count, (group.index + 1) * count)
    if replicate and group.size % units == 0:
        copies = group.size // units
        index = group.index // copies
        return Share(index * unit, (index + 1) * unit, copies)
    # Up to 64: a config.json is untrusted, and so is the length of this list.
    legal = [n for n in range(1, min(units, 64) + 1) if units % n == 0]
    raise InputError(
        f"{what}: {units} units of {unit} can't be split evenly over {group.size} {group.axis} ranks; legal sizes: {legal}"
    )
