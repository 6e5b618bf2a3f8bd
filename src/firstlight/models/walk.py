"""Run a model on shapes alone: every op call is recorded or costed, nothing is computed.

The modules that serve are the ones that are walked, so what is bound and what is predicted can't drift from what runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from firstlight.cache.pool import CachePool
from firstlight.cache.spec import PagedSpec
from firstlight.hardware import Hardware
from firstlight.hardware.timings import Timings
from firstlight.models.causal import CausalModel
from firstlight.nn.module import Module, caches
from firstlight.ops.binding import Binding, Record, bind, parse_overrides
from firstlight.ops.meta import specs
from firstlight.ops.observe import Bound, Observer, observed
from firstlight.ops.op import Call, Shape, sites
from firstlight.step import Bucket, PageTable, SlotTable, StepBatch, Table

LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")
"""How the paths of a layer's modules begin, and the names of its tensors."""


def bind_caches(model: CausalModel, pool: CachePool) -> None:
    """Give every module the pool's views of what it keeps."""
    for path, module in model.named_modules():
        if isinstance(module, Module) and path in pool.views:
            module.bind_cache(pool.views[path])


def meta_step(
    model: CausalModel, bucket: Bucket, *, decode_requests: int, page_size: int, shape: Shape | None = None
) -> StepBatch:
    """A step at a bucket's bounds on the meta device: `decode_requests` one-token rows, the rest prefill."""

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    tables: dict[str, Table] = {}
    for spec in caches(model).values():
        if isinstance(spec, PagedSpec):
            pages = empty(bucket.requests + 1, -(-bucket.context // page_size))
            slot = empty(bucket.tokens, dtype=torch.int64)
            tables[spec.group] = PageTable(pages, empty(bucket.requests), slot, page_size)
        else:
            tables[spec.group] = SlotTable(empty(bucket.requests), empty(bucket.requests), empty(0, 3))
    rows = model.position_rows
    return StepBatch(
        bucket=bucket,
        ids=empty(bucket.tokens, dtype=torch.int64),
        positions=empty(*((rows, bucket.tokens) if rows > 1 else (bucket.tokens,)), dtype=torch.int64),
        query_start=empty(bucket.requests + 1),
        length=empty(bucket.requests),
        log_length=empty(bucket.requests),
        adapter=empty(bucket.requests),
        logit_row=empty(bucket.logits, dtype=torch.int64),
        live=empty(1),
        tables=tables,
        decode_requests=decode_requests,
        decode_tokens=decode_requests,
        max_query=bucket.query,
        max_context=bucket.context,
        shape=shape
        or Shape(bucket.tokens, bucket.requests, bucket.requests * bucket.context, bucket.tokens * bucket.context),
    )


def walk(model: CausalModel, step: StepBatch, observer: Observer) -> None:
    """Run a model that is on the meta device under an observer, which returns the abstract results."""
    pool = CachePool(caches(model), pages=2, slots=2, page_size=_page_size(step), device="meta")
    bind_caches(model, pool)
    with torch.no_grad(), observed(model, observer, step.bucket.index):
        model(step)


def alike_layers(model: CausalModel, step: StepBatch, *, entry_norms: bool = True) -> list[list[int]]:
    """The layers of each kind, in the order of their first; layers are alike if they make the same calls in a step on the meta device.

    entry_norms: whether the norm before a layer counts, of which the first layer's has no sum to take, whatever its kind.
    """
    made: dict[int, list[Any]] = {}

    def observe(bound: Bound, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        found = LAYER.match(bound.path)
        if found and (entry_norms or not bound.path.startswith("input_layernorm", found.end())):
            call = bound.path[found.end() :], bound.op.name, specs(args), specs(kwargs)
            made.setdefault(int(found[1]), []).append(call)
        return bound.op.abstract(*args, **kwargs)

    walk(model, step, observe)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for layer, calls in sorted(made.items()):
        kinds.setdefault(tuple(calls), []).append(layer)
    return list(kinds.values())


def _page_size(step: StepBatch) -> int:
    return next((table.page_size for table in step.tables.values() if isinstance(table, PageTable)), 1)


def record(model: CausalModel, buckets: Sequence[Bucket], hardware: Hardware, page_size: int) -> list[Record]:
    """Every call that a model makes in each bucket: decode rows and, where a bucket allows longer ones, prefill rows."""
    by_path = dict(sites(model))
    records: list[Record] = []
    for bucket in buckets:
        observer = _recorder(records, by_path, bucket, hardware)
        # Decode and prefill sites are met in their own walk; all others see the bucket's bounds in the first.
        walk(
            model,
            meta_step(model, bucket, decode_requests=bucket.requests if bucket.query == 1 else 0, page_size=page_size),
            observer,
        )
        if bucket.query > 1:
            decode = Bucket(bucket.index, bucket.requests, bucket.requests, 1, bucket.context, bucket.logits)
            decoding = _recorder(records, by_path, bucket, hardware, label="decode")
            walk(model, meta_step(model, decode, decode_requests=bucket.requests, page_size=page_size), decoding)
    # What isn't part of a step has the same shapes in every bucket.
    apart: list[Record] = []
    first = buckets[0]
    with torch.no_grad(), observed(model, _recorder(apart, by_path, first, hardware), first.index):
        model.encode_shapes(first.index)
    records += [replace(record, call=replace(record.call, bucket=bucket)) for bucket in buckets for record in apart]
    return records


def _recorder(
    records: list[Record], by_path: Mapping[str, object], bucket: Bucket, hardware: Hardware, label: str = ""
) -> Observer:
    """Records every call, or those of sites with a label."""

    def observe(bound, args, kwargs):  # type: ignore[no-untyped-def]
        if label in ("", bound.label):
            records.append(Record(bound.path, by_path[bound.path], Call(args, kwargs, bucket, hardware)))  # type: ignore[arg-type]
        return bound.op.abstract(*args, **kwargs)

    return observe


def bind_model(
    model: CausalModel,
    buckets: Sequence[Bucket],
    hardware: Hardware,
    *,
    overrides: Sequence[str] = (),
    invariant: bool = False,
    page_size: int = 16,
    more: Sequence[Record] = (),
    timings: Timings | None = None,
) -> tuple[Binding, dict[tuple[str, str], str]]:
    """Bind a model on the meta device; returns the binding and the layout of each weight by (module path, attribute).

    more: records of sites outside the model (a sampler) to be bound with it. timings: to choose by; None: by rank.

    Raises BindingError for an override that can't be met.
    """
    own = [site for _, site in sites(model)]
    chosen = parse_overrides(overrides, [*own, *(record.site for record in more)])
    # A site is indexed by bucket, so before the walk each has an entry for every bucket.
    for site in own:
        site.unbind(len(buckets))
    records = [*record(model, buckets, hardware, page_size), *more]
    binding = bind(records, len(buckets), hardware, chosen, invariant, timings)
    layouts = {
        (path, attribute): binding.layouts[id(getattr(module, attribute))]
        for path, module in model.named_modules()
        if isinstance(module, Module)
        for attribute in module.weight_specs
        if id(getattr(module, attribute)) in binding.layouts
    }
    return binding, layouts
