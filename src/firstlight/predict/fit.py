"""Whether a batch fits into an engine's memory, and which layouts would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from firstlight.config import EngineOptions
from firstlight.hardware import Hardware
from firstlight.models import CausalModel
from firstlight.models.activations import planned_bytes
from firstlight.models.buckets import bucket_ladder, resolve_options
from firstlight.predict.layout import Layout, build
from firstlight.predict.memory import Memory, memory_of, weight_bytes

MOST_GPUS = 64
"""GPUs that are proposed at most."""


def engine_memory(
    model: CausalModel, hardware: Hardware, options: EngineOptions, requests: int, context: int, *, workspace: int = 0
) -> Memory:
    """The memory of an engine with these options, and with --max-running high enough for `requests` of `context` tokens.

    workspace: bytes of scratch memory that the providers declare.
    """
    options = resolve_options(options, hardware)
    options = options.model_copy(update={"max_running": max(options.max_running, requests)})
    # `model` is walked as it is, so every bucket finds it at the first place.
    steps = [replace(bucket, index=0) for bucket in bucket_ladder(options, context, hardware)]
    planned = planned_bytes(model, steps, page_size=options.page_size) + workspace
    return memory_of(
        model,
        hardware,
        planned=planned,
        page_size=options.page_size,
        max_running=options.max_running,
        max_context=context,
    )


def what_would_fit(
    config: Mapping[str, Any], layout: Layout, hardware: Hardware, options: EngineOptions, requests: int, context: int
) -> list[str]:
    """The least changes under which `requests` of `context` tokens fit, as options of `explain`: more GPUs, FP8 where it
    needs fewer of them, or both. Empty if none of those tried does."""
    ways, fewest = [], MOST_GPUS + 1
    for form, flags in _forms(layout, hardware):
        for wider, sizes in _wider(layout, hardware):
            other = replace(wider, **form)
            if other == layout or other.mesh.size >= fewest:
                continue
            try:
                model = build(config, other)
            except ValueError:  # these ranks can't split this model
                continue
            if "--dp" in sizes and not model.config.num_experts:
                continue  # a replica would hold all the weights again
            if weight_bytes(model) < hardware.memory and requests <= engine_memory(
                model, hardware, options, requests, context
            ).requests(context):
                ways.append(" ".join([sizes, *flags]).strip())
                fewest = other.mesh.size
                break
    return ways


def _forms(layout: Layout, hardware: Hardware) -> Iterator[tuple[dict[str, bool], list[str]]]:
    """Dtypes to try, and their options: as it is, an FP8 cache, FP8 weights."""
    yield {}, []
    if "float8_e4m3fn" in hardware.peak:
        for field, flag in (("float8_cache", "--fp8-kv"), ("float8_weights", "--fp8-weights")):
            if not getattr(layout, field):
                yield {field: True}, [flag]


def _wider(layout: Layout, hardware: Hardware) -> Iterator[tuple[Layout, str]]:
    """The layout, then over twice, four times... as many GPUs, with the options that say so: layers split as far as direct
    links reach, then experts spread over ever more replicas."""
    tp, dp, ep = layout.tensor_parallel, layout.data_parallel, layout.expert_parallel
    yield layout, ""
    factor = 2
    while tp * factor <= hardware.links[0].reach:
        spread = ep * factor if ep > 1 else 1
        sizes = f"--tp {tp * factor}" + (f" --ep {spread}" if spread > 1 else "")
        yield replace(layout, tensor_parallel=tp * factor, expert_parallel=spread), sizes
        factor *= 2
    while tp * dp * factor <= MOST_GPUS:
        sizes = f"--dp {dp * factor} --ep {tp * dp * factor}"
        yield replace(layout, data_parallel=dp * factor, expert_parallel=tp * dp * factor), sizes
        factor *= 2
