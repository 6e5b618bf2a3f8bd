"""The calls to measure: one layer of each kind of a model, real caches, and steps of rising sizes.

Caches are those of the whole model, so strides and addresses are what they will be when it serves. A tensor that a kernel
reads from memory has *siblings* that can stand in for it: the same cache in other layers, other requests' rows and slots,
copies of a weight. Calls that take them in turn find nothing of theirs in the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from firstlight.cache import CachePool, PagedSpec, page_bytes, slot_bytes
from firstlight.engine.loading import BoundModel
from firstlight.errors import FirstlightError
from firstlight.models import CausalModel
from firstlight.models.walk import LAYER, alike_layers, bind_caches, meta_step
from firstlight.nn.module import Module, caches
from firstlight.ops.op import sites
from firstlight.quant import Packed
from firstlight.step import Bucket, PageTable, SlotTable, StepBatch, Table, token_slots
from firstlight.weights.loader import load_weights
from firstlight.weights.random_weights import random_tensors

CONTEXT = 4096
"""Tokens of a decode row where nothing else is said."""
OTHER_CONTEXTS = (1024, 32768)
PROMPTS_TOGETHER = 8
CACHE_SHARE = 0.45
"""Of the memory that is free, for the caches of all layers; the rest is for weights, their copies, and activations."""
CPU_CACHE_BYTES = 1 << 28
MOST_VARIANTS = 16


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of equal rows: `requests` of `query` new tokens each, the last at place `context` of its request."""

    requests: int
    query: int
    context: int

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return self.requests * self.query

    def __str__(self) -> str:
        if self.query == 1:
            return f"decode, {self.requests} x context {self.context}"
        return f"prefill, {self.requests} x {self.query} of context {self.context}"


def step_shapes(
    max_rows: int, step_tokens: int, max_context: int, cached_tokens: int, page_size: int = 1
) -> list[StepShape]:
    """Steps in logarithmic paces: decode rows; prompts alone, side by side, behind a prefix; some rows at other contexts.

    max_rows: decode rows at most. cached_tokens: what the KV pool holds, in pages of `page_size`.
    """
    rows = sorted({2**i for i in range(max_rows.bit_length()) if 2**i <= max_rows} | {max_rows})
    shapes = [
        StepShape(count, 1, min(CONTEXT, max_context, cached_tokens // count // page_size * page_size))
        for count in rows
    ]
    longest = min(max_context, cached_tokens)
    tokens = sorted({size for size in (128, 512, 2048, 8192, 32768) if size <= step_tokens} | {step_tokens})
    shapes += [StepShape(1, size, size) for size in tokens if size <= longest]
    shapes += [
        StepShape(PROMPTS_TOGETHER, size // PROMPTS_TOGETHER, size // PROMPTS_TOGETHER)
        for size in tokens
        if size >= 128 * PROMPTS_TOGETHER and size <= cached_tokens
    ]
    behind = max(OTHER_CONTEXTS)
    shapes += [StepShape(1, size, behind) for size in tokens if 512 <= size <= 2048 and behind <= longest]
    shapes += [
        StepShape(count, 1, context)
        for context in OTHER_CONTEXTS
        for count in rows[::3]
        if context <= max_context and context * count <= cached_tokens
    ]
    pages = cached_tokens // page_size
    return list(
        dict.fromkeys(
            shape
            for shape in shapes
            if shape.context >= shape.query and shape.requests * -(-shape.context // page_size) <= pages
        )
    )


def layer_kinds(model: CausalModel, page_size: int) -> list[int]:
    """The first layer of each kind. The model is on the meta device."""
    step = meta_step(model, Bucket(0, 6, 3, 4, 64, 3), decode_requests=2, page_size=page_size)
    return [group[0] for group in alike_layers(model, step, entry_norms=False)]


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """What tells a tensor's memory and view apart from others'."""
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Workload:
    """A model that is loaded in part, with caches of all its layers.

    model: one layer of each kind, every call bound to its reference. rows: decode rows that there are states for.
    """

    def __init__(self, bound: BoundModel, *, max_rows: int, page_size: int, cache_bytes: int, seed: int) -> None:
        """bound: on the meta device. cache_bytes: for all caches; 0: a share of what is free. Raises FirstlightError."""
        self.device, self.dtype, self.page_size = bound.device, bound.dtype, page_size
        self.model = model = bound.model
        if hasattr(model, "visual"):
            vars(model)["_modules"].pop("visual", None)  # no part of a step
        kept = layer_kinds(model, page_size)
        self.vocabulary = model.config.vocab_size
        self._generator = torch.Generator(self.device).manual_seed(seed)
        specs = caches(model)
        rows = max_rows
        budget = cache_bytes or self._free_bytes()
        state = slot_bytes(specs.values())
        if state:
            rows = min(rows, int(budget / 2 / state) - 1)
        each = page_bytes(specs.values(), page_size)
        pages = min(1 + max_rows * CONTEXT // page_size, int(budget / 2 / each)) if each else 2
        if rows < 1 or pages < 2:
            raise FirstlightError(
                f"the caches of one request don't fit into {budget / 2**30:.2f} GiB; give more with --cache-gib"
            )
        self.rows, self.pages = rows, pages
        self.pool = CachePool(
            specs, pages=pages, slots=rows + 1 if state else 0, page_size=page_size, device=self.device
        )
        bind_caches(model, self.pool)
        model.layers = torch.nn.ModuleList([model.layers[layer] for layer in kept])
        self._load(bound, kept, seed)
        for _, site in sites(model):
            site.unbind()
        self._siblings: dict[tuple[Any, ...], list[Tensor]] = {}
        self._sibling_caches()
        self.weights = {identity(tensor): tensor for tensor in self._weight_tensors()}
        self._scattered = 1 + torch.randperm(pages - 1, generator=self._generator, device=self.device).int()

    @property
    def cached_tokens(self) -> int:
        """Tokens that the KV pool holds; unbounded for a model without pages."""
        return (self.pages - 1) * self.page_size if self.pool.page_bytes else 1 << 30

    def _free_bytes(self) -> int:
        if self.device.type != "cuda":
            return CPU_CACHE_BYTES
        return int(torch.cuda.mem_get_info(self.device)[0] * CACHE_SHARE)

    def _load(self, bound: BoundModel, kept: Sequence[int], seed: int) -> None:
        """Weights of the kept layers: the checkpoint's if it has some, else random ones."""
        if bound.stored:
            stored = {}
            for name, tensor in bound.stored.items():
                found = LAYER.match(name)
                if found is None or int(found[1]) in kept:
                    stored[name] = tensor
            model_ignores = (*self.model.ignored, r"visual\.")
            self.model.ignored = model_ignores  # type: ignore[misc]
        else:
            stored = random_tensors(self.model, seed, self.device)
        load_weights(self.model, stored, self.device)

    def _weight_tensors(self) -> Iterator[Tensor]:
        for module in self.model.modules():
            if isinstance(module, Module):
                for attribute in module.weight_specs:
                    weight = getattr(module, attribute)
                    yield from weight.parts.values() if isinstance(weight, Packed) else [weight]

    def _sibling_caches(self) -> None:
        """Every view of a cache can stand for those of the same shape in other layers."""
        alike: dict[Any, list[Tensor]] = {}
        for path, views in self.pool.views.items():
            for name, view in views.items():
                alike.setdefault((str(self.pool.specs[path]), name), []).append(view)
        for group in alike.values():
            for i, view in enumerate(group):
                self._siblings[identity(view)] = group[i:] + group[:i]

    def fill_caches(self) -> None:
        """Normal numbers in every row, page and slot, but NaN in the null ones."""
        for path, views in self.pool.views.items():
            for view in views.values():
                scale = 1.0 if isinstance(self.pool.specs[path], PagedSpec) else 0.3
                if view.dtype.itemsize > 1:
                    view.normal_(generator=self._generator).mul_(scale)
                else:
                    view.copy_(torch.randn(view.shape, generator=self._generator, device=self.device))
        self.pool.poison([0] if self.pool.page_bytes else (), [0] if self.pool.slot_bytes else ())

    def siblings(self, tensor: Tensor) -> list[Tensor]:
        """Tensors that can stand in for one, itself first; alone if there are no others."""
        return self._siblings.get(identity(tensor), [tensor])

    def step(self, shape: StepShape) -> StepBatch:
        """A step of this shape. Its index tensors have siblings that name other requests."""
        requests, query, tokens, context = shape.requests, shape.query, shape.tokens, shape.context
        device = self.device
        columns = math.ceil(context / self.page_size)
        held = (self.pages - 1) // columns if self.pool.page_bytes else self.rows
        variants = max(1, min(min(held, self.rows if self.pool.slot_bytes else held) // requests, MOST_VARIANTS))
        bucket = Bucket(0, tokens, requests, query, context, requests)
        decode = query == 1
        start = torch.arange(requests + 1, device=device, dtype=torch.int32) * query
        index = torch.arange(context - query, context, device=device).repeat(requests)
        request = torch.arange(requests, device=device).repeat_interleave(query)
        tables: dict[str, Table] = {}
        for spec in caches(self.model).values():
            if spec.group in tables:
                continue
            if isinstance(spec, PagedSpec):
                tables[spec.group] = self._page_table(requests, columns, variants, request, index)
            else:
                tables[spec.group] = self._slot_table(requests, variants, fresh=context == query)
        positions = index.expand(self.model.position_rows, -1).contiguous() if self.model.position_rows > 1 else index
        ones = torch.ones(requests, dtype=torch.int32, device=device)
        zeros = torch.zeros(requests, dtype=torch.int32, device=device)
        return StepBatch(
            bucket=bucket,
            ids=torch.randint(0, self.vocabulary, (tokens,), generator=self._generator, device=device),
            positions=positions,
            query_start=start,
            length=ones * context,
            log_length=zeros,
            adapter=zeros,
            logit_row=start[1:].long() - 1,
            live=torch.full((1,), tokens, dtype=torch.int32, device=device),
            tables=tables,
            decode_requests=requests if decode else 0,
            decode_tokens=requests if decode else 0,
            max_query=query,
            max_context=context,
        )

    def sampling(self, step: StepBatch) -> tuple[Tensor, ...]:
        """Temperature, top_k, top_p, seed and position of every row whose logits are wanted."""
        rows = step.logit_row.shape[0]
        number = torch.arange(rows, device=self.device)
        share = torch.full((rows,), 0.9, device=self.device)
        return share, torch.full_like(number, 50), share.clone(), number, number + step.max_context

    def _page_table(self, requests: int, columns: int, variants: int, request: Tensor, index: Tensor) -> PageTable:
        """Scattered pages; a variant's requests have rows, hence pages, of their own."""
        total = variants * requests
        pages = torch.zeros((total + 1, columns), dtype=torch.int32, device=self.device)
        pages[1:] = self._scattered[: total * columns].view(total, columns)
        rows = [
            torch.arange(1 + i * requests, 1 + (i + 1) * requests, device=self.device).int() for i in range(variants)
        ]
        slots = [token_slots(pages, row, request, index, self.page_size) for row in rows]
        self._note(rows)
        self._note(slots)
        return PageTable(pages, rows[0], slots[0], self.page_size)

    def _slot_table(self, requests: int, variants: int, fresh: bool) -> SlotTable:
        slots = [
            torch.arange(1 + i * requests, 1 + (i + 1) * requests, device=self.device).int() for i in range(variants)
        ]
        self._note(slots)
        before = torch.zeros_like(slots[0]) if fresh else slots[0].clone()
        if not fresh:
            self._note([before, *(slot.clone() for slot in slots[1:])])
        return SlotTable(before, slots[0], torch.zeros((0, 3), dtype=torch.int32, device=self.device))

    def _note(self, tensors: list[Tensor]) -> None:
        self._siblings[identity(tensors[0])] = tensors

    def bucket_of(self, step: StepBatch) -> Bucket:
        """The bucket that a call of this step is bound in: its exact sizes."""
        return replace(step.bucket, index=0)
