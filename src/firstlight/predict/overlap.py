"""Two-batch overlap: the step is cut in two halves, and what one sends is hidden behind what the other computes.

In a prefill, a layer with experts has four turns: attention beside the other half's dispatch, experts beside dispatch, experts
beside combine, attention beside combine; each lasts as long as the longer of the two, and the exchange takes some processors
from computing. In a decode it takes none, and attention is cut so that turns are even: a layer lasts as long as both halves
compute, or send, or as one of them does both, whichever is longest. (DeepSeek-V3/R1 inference system overview.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from firstlight.predict.kernel_time import KernelTime
from firstlight.predict.shape import Numbers, Part, StepShape

EXCHANGES = ("dispatch", "combine")


def halved(shape: StepShape) -> StepShape:
    """Half of every row sum."""

    def half(part: Part) -> Part:
        return Part(part.requests / 2, part.tokens / 2, part.keys / 2, part.pairs / 2, part.longest)

    return StepShape(half(shape.decode), half(shape.prefill))


def seconds(
    halves: Sequence[KernelTime], layers: int, sparse_layers: int, prefills: NDArray[np.bool_], memory: float
) -> Numbers:
    """Seconds of both halves together.

    halves: the kernels of one half. layers, sparse_layers: of the model, and those with experts among them. prefills: which
    steps have prompt tokens. memory: bytes a second that kernels bound by it reach.
    """
    turns = {name: np.zeros_like(halves[0].seconds) for name in ("attention", "feed_forward", *EXCHANGES, "")}
    for item in halves:
        name = item.kernel.kind if item.kernel.kind in EXCHANGES else item.kernel.segment
        turns[name] = turns[name] + item.seconds
    sparse = max(sparse_layers, 1)
    slowed = _contention(halves, memory) / sparse / 2
    # Times of one layer with experts; attention and feed-forward are taken to be alike in all layers.
    attention, experts = turns["attention"] / layers + slowed, turns["feed_forward"] / layers + slowed
    dispatch, combine = turns["dispatch"] / sparse, turns["combine"] / sparse
    compute, exchange = attention + experts, dispatch + combine
    uneven = (
        np.maximum(attention, dispatch)
        + np.maximum(experts, dispatch)
        + np.maximum(experts, combine)
        + np.maximum(attention, combine)
    )
    even = np.maximum(np.maximum(2 * compute, 2 * exchange), compute + exchange)
    dense = 1 - sparse / layers
    rest = 2 * ((turns["attention"] + turns["feed_forward"]) * dense + turns[""])
    both: Numbers = np.where(prefills, uneven, even) * sparse + rest
    return both


def _contention(halves: Sequence[KernelTime], memory: float) -> Numbers:
    """Seconds by which the exchange's trips through memory slow what memory bounds beside it."""
    computing = [item for item in halves if item.kernel.kind not in (*EXCHANGES, "collective")]
    bound_by_memory = np.sum([item.seconds for item in computing if item.bound[0] == "memory"], axis=0)
    share = bound_by_memory / np.sum([item.seconds for item in computing], axis=0)
    moved: Numbers = np.sum([item.moved for item in halves if item.kernel.kind in EXCHANGES], axis=0)
    return moved / memory * share
