"""Attach process groups to a mesh, in a run. Needs one process a rank."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from firstlight.parallel.mesh import AXES, Mesh

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A collective that waits longer than this means that a rank is gone. NCCL's in a CUDA graph have no timeout."""

LARGE = 1 << 22
"""Elements of a message that counts as large."""


def backend_of(device: torch.device) -> str:
    """torch.distributed's backend for a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def gather_into(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Put every rank's `part` one after the other into `whole`. torch is asked for it now, not when this module is imported: a build
    without collectives has neither name, and runs one rank all the same."""
    gather = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # the older name, before torch 2.13
    gather(whole, part, group=group)


def attach(mesh: Mesh, rank: int, address: str, device: torch.device) -> Mesh:
    """Join the ranks of a mesh and return it with a group handle on every axis that has more than one rank.

    rank: this process's, in [0, mesh.size). address: "tcp://host:port" of rank 0's store. device: this rank's.
    Every rank must call this with the same sizes. When it returns, each group has communicated: what a backend sets up and
    allocates at its first collectives is there, as it must be before one is captured in a CUDA graph, and before the caches
    take the memory that is left. Raises RuntimeError if the others don't come.
    """
    backend = backend_of(device)
    dist.init_process_group(
        backend,
        init_method=address,
        rank=rank,
        world_size=mesh.size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    sizes = {axis: getattr(mesh, axis).size for axis in AXES}
    handles = {}
    for axis in AXES:
        if sizes[axis] == 1:
            continue
        others = [other for other in AXES if other != axis]
        for fixed in product(*(range(sizes[other]) for other in others)):
            place = dict(zip(others, fixed, strict=True))
            ranks = [_rank({**place, axis: i}, sizes) for i in range(sizes[axis])]
            # Every rank takes part in making every group. All ranks are one already: each communicator takes GPU memory.
            group = dist.group.WORLD if len(ranks) == mesh.size else dist.new_group(ranks, backend=backend)
            if rank in ranks:
                handles[axis] = group
                _communicate(group, len(ranks), device)
    if mesh.ep.size > 1:
        raise NotImplementedError(f"ep {mesh.ep.size}: expert-parallel groups can't be attached; use --tensor-parallel")
    return replace(mesh, **{axis: replace(getattr(mesh, axis), handle=handle) for axis, handle in handles.items()})


def _communicate(group: dist.ProcessGroup | None, size: int, device: torch.device) -> None:
    """One collective of each kind that ops use, small and large: NCCL has ways for either, and connects them when first used."""
    for elements in (1, LARGE):
        part = torch.ones(elements, device=device)
        dist.all_reduce(part, group=group)
        gather_into(part.new_empty(size * elements), part, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rank(place: dict[str, int], sizes: dict[str, int]) -> int:
    rank = 0
    for axis in AXES:
        rank = rank * sizes[axis] + place[axis]
    return rank
