"""Joins the parts that the ranks of a group hold."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.op import NO_COST, Cost, Op, Shape
from firstlight.parallel import Group
from firstlight.parallel.groups import gather_into


def body(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """out = x of rank 0 | x of rank 1 | ... along dimension `dim` (negative counts from the end).

    x [...], of one shape and dtype on all ranks. A group of one returns x itself. Exact: a copy.
    Raises ValueError if the group has several ranks and no process group.
    """
    if group.size == 1:
        return x
    if group.handle is None:
        raise ValueError(f"all_gather over {group.size} {group.axis} ranks: no process group is attached to {group}")
    parts = x.new_empty((group.size, *x.shape))
    gather_into(parts.flatten(0, 1), x.contiguous(), group=group.handle)
    dim %= x.dim()
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def abstract(x: Tensor, group: Group, *, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= group.size
    return x.new_empty(shape)


def cost(shape: Shape, x: Tensor, group: Group, *, dim: int) -> Cost:
    """Each rank's part goes once to every other rank."""
    if group.size == 1:
        return NO_COST
    return Cost(read=x.nbytes, written=x.nbytes * group.size, sent=x.nbytes * (group.size - 1), messages=1)


all_gather = Op("all_gather", body, abstract=abstract, cost=cost)
