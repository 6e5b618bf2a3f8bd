"""What is sent between GPUs: collectives of tensor parallelism, and the exchange of tokens among experts' ranks.

A message takes a start and its bytes over the share of the link's bandwidth that collectives reach.
"""

from __future__ import annotations

import numpy as np

from firstlight.hardware import Hardware, Link
from firstlight.parallel import Mesh
from firstlight.predict import constants
from firstlight.predict.dims import Dims
from firstlight.predict.efficiency import Curve
from firstlight.predict.kernels import Kernel
from firstlight.predict.shape import Numbers, StepShape
from firstlight.predict.walk import VARIABLES, WalkedModel

DISPATCH_BYTES = 1 + 4 / 128
"""Bytes of an element on its way to experts: FP8, and a float32 scale for each 128."""
COMBINE_BYTES = 2.0


def link_of(hardware: Hardware, ranks: int) -> Link:
    """The nearest link that connects so many GPUs. Raises ValueError if none is described."""
    for link in hardware.links:
        if ranks <= link.reach:
            return link
    raise ValueError(f"{hardware.name}: no described link connects {ranks} GPUs")


def seconds(
    kernel: Kernel, sent: Numbers, hardware: Hardware, mesh: Mesh, shape: StepShape, efficiency: Curve
) -> tuple[Numbers, Numbers]:
    """(seconds, least seconds) of a message; 0 where nothing is sent. efficiency: of collectives inside a server."""
    if kernel.kind == "collective":
        ranks = kernel.dims.sizes["ranks"]
        link = link_of(hardware, ranks)
        floor = sent / link.bandwidth
        if link is not hardware.links[0]:
            start = constants.HEAVY_START["all_reduce"] + constants.ALL_TO_ALL_START
            return floor / constants.NETWORK_SHARE + start * (sent > 0), floor
        size = sent / 2 * ranks / (ranks - 1)
        return floor / efficiency.at(size) + constants.HEAVY_START["all_reduce"] * (sent > 0), floor
    inside, across = _exchanged(kernel, sent, hardware, mesh, shape)
    near, far = hardware.links[0], hardware.links[-1]
    floor = np.maximum(inside / near.bandwidth, across / far.bandwidth)
    taken = np.maximum(inside / near.bandwidth / constants.LINK_SHARE, across / far.bandwidth / constants.NETWORK_SHARE)
    start = constants.ALL_TO_ALL_START if mesh.ep.size > near.reach else constants.EXCHANGE_START
    return taken + start * (sent > 0), floor


def _exchanged(
    kernel: Kernel, copies: Numbers, hardware: Hardware, mesh: Mesh, shape: StepShape
) -> tuple[Numbers, Numbers]:
    """Bytes that a rank sends inside its server, and to others.

    copies: bytes if each token went to each of its experts on its own. A decode does that (least latency). A prefill sends
    a token once to each server that has some of its experts, where it is passed on.
    """
    ranks, reach = mesh.ep.size, hardware.links[0].reach
    servers = max(-(-ranks // reach), 1)
    top_k = kernel.dims.sizes["top_k"]
    outside = copies * (1 - min(reach, ranks) / ranks)
    inside = copies * (min(reach, ranks) - 1) / ranks
    if servers > 1:
        reached = servers * (1 - (1 - 1 / servers) ** top_k) * (1 - 1 / servers)  # other servers that hold some expert
        outside = np.where(shape.prefill.tokens > 0, copies / top_k * reached, outside)
    return inside, outside


def expert_exchange(model: WalkedModel, mesh: Mesh, kernels: list[Kernel]) -> list[Kernel]:
    """Dispatch and combine of each layer with experts, where those are spread over ranks of expert parallelism."""
    if mesh.ep.size == 1 or not model.sparse_layers:
        return []
    routed = next(kernel for kernel in kernels if kernel.kind == "experts")
    sizes = routed.dims.sizes
    assignments = routed.flops / (6.0 * sizes["hidden"] * sizes["intermediate"])
    found = []
    for name, element in (("dispatch", DISPATCH_BYTES), ("combine", COMBINE_BYTES)):
        sent = assignments * sizes["hidden"] * element
        dims = Dims({"ranks": mesh.ep.size, "top_k": sizes["top_k"]})
        found.append(
            Kernel(
                name,
                name,
                "",
                name,
                model.sparse_layers,
                dims,
                sent=sent,
                moved=sent * constants.EXCHANGE_TRIPS,
                segment="feed_forward",
            )
        )
    # In a prefill, tokens that arrive are sorted by expert, and what experts give back is put in the order of their senders;
    # a decode's exchange writes them where they are wanted.
    moved = assignments * sizes["hidden"] * (2 * 1.0 + 2 * 2.0)
    moved = moved * np.array([name.startswith("prefill") for name in VARIABLES])
    name = "sort exchanged tokens"
    found.append(
        Kernel(
            name,
            name,
            "prefill",
            "elementwise",
            model.sparse_layers,
            Dims(),
            moved=moved,
            launches=2,
            segment="feed_forward",
        )
    )
    return found
