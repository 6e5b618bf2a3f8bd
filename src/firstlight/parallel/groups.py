"""Attach process groups to a mesh, in a run. Needs one process a rank."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import product

import torch.distributed as dist

from firstlight.parallel.mesh import AXES, Mesh

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A collective that waits longer than this means that a rank is gone."""


def attach(mesh: Mesh, rank: int, address: str, backend: str) -> Mesh:
    """Join the ranks of a mesh and return it with a group handle on every axis that has more than one rank.

    rank: this process's, in [0, mesh.size). address: "tcp://host:port" of rank 0's store. backend: "gloo" or "nccl".
    Every rank must call this with the same sizes. Raises RuntimeError if the others don't come.
    """
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=mesh.size, timeout=COLLECTIVE_TIMEOUT)
    sizes = {axis: getattr(mesh, axis).size for axis in AXES}
    handles = {}
    for axis in AXES:
        if sizes[axis] == 1:
            continue
        others = [other for other in AXES if other != axis]
        for fixed in product(*(range(sizes[other]) for other in others)):
            place = dict(zip(others, fixed, strict=True))
            ranks = [_rank({**place, axis: i}, sizes) for i in range(sizes[axis])]
            group = dist.new_group(ranks, backend=backend)  # every rank takes part in making every group
            if rank in ranks:
                handles[axis] = group
    if mesh.ep.size > 1:
        raise NotImplementedError(f"ep {mesh.ep.size}: expert-parallel groups can't be attached; use --tensor-parallel")
    return replace(mesh, **{axis: replace(getattr(mesh, axis), handle=handle) for axis, handle in handles.items()})


def _rank(place: dict[str, int], sizes: dict[str, int]) -> int:
    rank = 0
    for axis in AXES:
        rank = rank * sizes[axis] + place[axis]
    return rank
