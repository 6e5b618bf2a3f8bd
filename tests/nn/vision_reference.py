"""transformers' Qwen3.5 with a vision tower beside ours with the same weights, and inputs for both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference import reference_model, tiny_config
from torch import Tensor

from firstlight.cache import CachePool
from firstlight.models import CausalModel, build_model
from firstlight.nn.module import Module, caches
from firstlight.nn.vision import VisionTower
from firstlight.nn.vision_config import Grid
from firstlight.step import Bucket, PageTable, SlotTable, StepBatch
from firstlight.weights.loader import load_weights, published_names
from firstlight.weights.stored import Range, StoredTensor

IMAGE, VIDEO, VISION_START, VISION_END = 500, 501, 502, 503  # token ids of the tiny configs
MERGE = 2


class MemoryTensor(StoredTensor):
    """A tensor of a state dict as the loader takes it."""

    def __init__(self, name: str, values: Tensor) -> None:
        super().__init__(name, tuple(values.shape), values.dtype, values.nbytes, Path("memory"))
        self.values = values

    def load_slice(self, ranges: Sequence[Range] | None) -> Tensor:
        return self.values[tuple(slice(*part) for part in self.full_ranges(ranges))]


@lru_cache(maxsize=2)
def models(name: str) -> tuple[Any, CausalModel]:
    """(transformers' model, ours) of a tiny config, in float32 with every tensor randomised."""
    reference = reference_model(name)
    ours = build_model(tiny_config(name), dtype=torch.float32)
    stored = {key: MemoryTensor(key, values) for key, values in reference.state_dict().items()}
    load_weights(ours, published_names(type(ours), stored), "cpu")
    return reference, ours


def tower_of(model: torch.nn.Module) -> VisionTower:
    """The vision tower of one of our models."""
    tower = model.visual
    assert isinstance(tower, VisionTower)
    return tower


def draw_patches(grids: Sequence[Grid], seed: int = 0) -> Tensor:
    """Random patches for images of these grids: [P, 1536] float32, of about the range that processors give."""
    count = sum(frames * rows * columns for frames, rows, columns in grids)
    return torch.randn(count, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(seed))


def text(count: int, seed: int) -> list[int]:
    """Random tokens that aren't placeholders."""
    return torch.randint(3, 480, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def image(grid: Grid) -> list[int]:
    """The tokens of an image."""
    return [VISION_START, *[IMAGE] * (grid[0] * grid[1] * grid[2] // MERGE**2), VISION_END]


def video(grid: Grid) -> list[int]:
    """The tokens of a video: each frame has a time (here two tokens) before it."""
    frame = [VISION_START, *[VIDEO] * (grid[1] * grid[2] // MERGE**2), VISION_END]
    return [token for i in range(grid[0]) for token in (*text(2, i), *frame)]


def token_types(ids: Sequence[int]) -> Tensor:
    """transformers' `mm_token_type_ids`: [1, T], 1 for images' tokens, 2 for videos'."""
    tokens = torch.tensor([list(ids)])
    return (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()


def worst_row_error(ours: Tensor, reference: Tensor) -> float:
    """The largest over rows of |difference| / |reference|, in Euclidean norms; infinite if anything isn't finite."""
    if not ours.isfinite().all():
        return float("inf")
    ours, reference = ours.double(), reference.double()
    return float(((ours - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


class Runner:
    """Runs one request through a model, a piece of its context at a time, in a cache whose null rows are poisoned."""

    PAGE_SIZE = 7

    def __init__(self, model: CausalModel, context: int) -> None:
        specs = caches(model)
        count = -(-context // self.PAGE_SIZE)
        self.model, self.pages, self.done = model, count, 0
        pool = CachePool(specs, pages=count + 1, slots=2, page_size=self.PAGE_SIZE, device="cpu")
        pool.poison(range(count + 1), range(2))
        for path, views in pool.views.items():
            module = model.get_submodule(path)
            assert isinstance(module, Module)
            module.bind_cache(views)

    def __call__(
        self, ids: Sequence[int], positions: np.ndarray, rows: np.ndarray | None = None, embeds: Tensor | None = None
    ) -> Tensor:
        """Logits of every token, [T, vocabulary]. positions: [3, T]. rows, embeds: `embed_row` and `embeds` of the step."""
        tokens, context = len(ids), self.done + len(ids)
        decode = self.done > 0 and tokens == 1
        index = torch.arange(self.done, context)
        # Pages from the last to the first, so that a place in the context isn't the place in the pool.
        pages = torch.arange(self.pages, 0, -1, dtype=torch.int32)[None]
        slot = pages[0].long()[index // self.PAGE_SIZE] * self.PAGE_SIZE + index % self.PAGE_SIZE
        one = torch.ones(1, dtype=torch.int32)
        step = StepBatch(
            bucket=Bucket(tokens=tokens, query=tokens, context=context, logits=tokens),
            ids=torch.tensor(list(ids)),
            positions=torch.from_numpy(np.ascontiguousarray(positions)),
            query_start=torch.tensor([0, tokens], dtype=torch.int32),
            length=one * context,
            log_length=one * 0,
            adapter=one * 0,
            logit_row=torch.arange(tokens),
            live=one * tokens,
            tables={
                "attention": PageTable(pages, one * 0, slot, self.PAGE_SIZE),
                "state": SlotTable(one * (self.done > 0), one, torch.zeros(0, 3, dtype=torch.int32)),
            },
            decode_requests=int(decode),
            decode_tokens=int(decode),
            max_query=tokens,
            max_context=context,
            embed_row=None if rows is None else torch.from_numpy(rows),
            embeds=embeds,
        )
        self.done = context
        logits: Tensor = self.model(step)
        return logits
