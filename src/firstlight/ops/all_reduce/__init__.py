"""Sum over the ranks of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import NO_COST, Cost, Op, Shape
from firstlight.parallel import Group


def body(x: Tensor, group: Group) -> Tensor:
    """out = sum of x over the ranks of the group; every rank gets it.

    x [...], of one shape and dtype on all ranks; it isn't written. A group of one returns x itself.
    Raises ValueError if the group has several ranks and no process group. Tolerance: the order of the sum is the
    backend's; in low precision every partial sum may be rounded.
    """
    if group.size == 1:
        return x
    if group.handle is None:
        raise ValueError(f"all_reduce over {group.size} {group.axis} ranks: no process group is attached to {group}")
    total = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group.handle)
    return total


def abstract(x: Tensor, group: Group) -> Tensor:
    return x.new_empty(x.shape)


def cost(shape: Shape, x: Tensor, group: Group) -> Cost:
    """Each rank sends each element twice (reduce, then spread), but for its own share."""
    if group.size == 1:
        return NO_COST
    return Cost(read=x.nbytes, written=x.nbytes, sent=2 * x.nbytes * (group.size - 1) / group.size, messages=1)


all_reduce = Op("all_reduce", body, abstract=abstract, cost=cost)
