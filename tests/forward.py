"""Run a model by hand on one sequence, whole or in pieces, and read all its logits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from firstlight.cache import CachePool
from firstlight.hardware import CPU_GENERIC
from firstlight.models import CausalModel, build_model, family
from firstlight.models.walk import bind_caches, bind_model
from firstlight.nn.module import caches
from firstlight.parallel import Mesh
from firstlight.quant import scheme_of
from firstlight.step import Bucket, PageTable, SlotTable, StepBatch, Table, token_slots
from firstlight.weights.checkpoint import open_checkpoint
from firstlight.weights.loader import load_weights, published_names

PAGE = 16
BUCKET = Bucket(0, 512, 4, 512, 512, 512)


def load(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
    state_dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> CausalModel:
    """The model of a checkpoint directory, bound and loaded on the CPU, with caches of its own."""
    checkpoint = open_checkpoint(directory)
    stored = published_names(family(checkpoint.config), checkpoint.tensors)
    scheme = scheme_of(checkpoint.config, dtype, stored={name: tensor.dtype for name, tensor in stored.items()})
    model = build_model(
        checkpoint.config, dtype=dtype, scheme=scheme, mesh=mesh, cache_dtype=cache_dtype, state_dtype=state_dtype
    )
    _, layouts = bind_model(model, [BUCKET], CPU_GENERIC)
    load_weights(model, stored, "cpu", layouts)
    pool = CachePool(caches(model), pages=40, slots=3, page_size=PAGE, device="cpu")
    pool.poison(range(40), range(3))
    bind_caches(model, pool)
    return model


def step_of(model: CausalModel, ids: Sequence[int], start: int) -> StepBatch:
    """Tokens [start, start + n) of the one sequence, which owns pages 1... and slot 1; logits of all of them."""
    n, length = len(ids), start + len(ids)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    pages = torch.zeros(2, 32, dtype=torch.int32)
    pages[1] = torch.arange(1, 33)
    row, index = integers(1), torch.arange(start, length)
    slot = token_slots(pages, row, torch.zeros(n, dtype=torch.long), index, PAGE)
    tables: Mapping[str, Table] = {
        "attention": PageTable(pages, row, slot, PAGE),
        "state": SlotTable(integers(1 if start else 0), integers(1), torch.zeros(0, 3, dtype=torch.int32)),
    }
    positions = index.expand(3, -1).contiguous() if model.position_rows == 3 else index
    decodes = int(n == 1)
    return StepBatch(
        BUCKET, torch.tensor(list(ids)), positions, integers(0, n), integers(length), integers(0), integers(0),
        torch.arange(n), integers(n), tables, decodes, decodes, n, length,
    )  # fmt: skip


@torch.inference_mode()
def logits(model: CausalModel, ids: Sequence[int], cuts: Sequence[int] = ()) -> torch.Tensor:
    """[T, V]; cuts: where the sequence is split into steps."""
    edges = [0, *cuts, len(ids)]
    return torch.cat([model(step_of(model, ids[a:b], a)) for a, b in itertools.pairwise(edges)])


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative error of a row; infinite if anything isn't finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).max().item()


def sequence(length: int = 75, seed: int = 1) -> list[int]:
    """Random token ids."""
    return torch.randint(3, 480, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(reference: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, V] from transformers."""
    with torch.no_grad():
        return reference(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
