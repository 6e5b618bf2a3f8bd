"""How much memory a step takes beside weights and caches, known before anything runs.

The model is walked on the meta device, where tensors live and die as they do in a run; their bytes, with the scratch memory
that the providers bound at each call declare, have a peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firstlight.cache.pool import CachePool
from firstlight.models.causal import CausalModel
from firstlight.models.walk import bind_caches, meta_step
from firstlight.nn.module import caches
from firstlight.ops.observe import Bound, observed
from firstlight.ops.op import sites
from firstlight.step import Bucket

ALLOCATION = 512
"""Bytes; a device's allocator rounds up to multiples."""


class _LiveBytes(TorchDispatchMode):
    """Follows the storages that are made while it is on. peak: the most bytes alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_tensor(tensor)}
        for tensor in tree_leaves(result):
            if _is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
                self.alive[storage._cdata] = StorageWeakRef(storage), size
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes alive."""
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        return sum(size for _, size in self.alive.values())


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def activation_bytes(model: CausalModel, bucket: Bucket, *, decode_requests: int, page_size: int) -> int:
    """Peak bytes of a step at a bucket's bounds: what it makes, with the scratch memory of the providers that are bound.

    model: on the meta device, bound. decode_requests: as in `meta_step`. The step's own inputs count too, logits included.
    """
    workspaces: Mapping[str, int] = {
        path: site.choices[bucket.index].workspace for path, site in sites(model) if site.choices
    }
    live = _LiveBytes()

    def observe(bound: Bound, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = bound.op.abstract(*args, **kwargs)
        live.peak = max(live.peak, live.now() + workspaces.get(bound.path, 0))
        return result

    pool = CachePool(caches(model), pages=2, slots=2, page_size=page_size, device="meta")
    bind_caches(model, pool)
    with torch.no_grad(), live, observed(model, observe, bucket.index):
        model(meta_step(model, bucket, decode_requests=decode_requests, page_size=page_size))
    return live.peak


RESERVE = 4 << 30
"""Bytes on a GPU that no plan counts: libraries' workspaces, kernels' code, what an allocator can't use."""


def planned_bytes(model: CausalModel, buckets: Sequence[Bucket], *, page_size: int) -> int:
    """What a GPU needs beside weights and caches: the largest step, twice, its logits as they are drawn from, and a reserve.

    Twice: captured steps keep what they need for good, the largest one for all of them; and a step that no graph holds takes
    as much again.
    """
    largest = buckets[-1]
    step = activation_bytes(model, largest, decode_requests=0, page_size=page_size)
    drawing = largest.logits * model.config.vocab_size * 8  # as float32, and once more while being filtered
    return 2 * (step + drawing) + RESERVE
