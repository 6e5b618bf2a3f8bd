"""How large steps are, by kinds of hardware: the ladder of buckets, and what an option is where it wasn't given."""

from __future__ import annotations

from firstlight.config import EngineOptions
from firstlight.hardware import Hardware
from firstlight.step import Bucket

PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Prompt tokens in a step, by which a GPU's buckets rise."""
MIXED_PROMPTS = 32
"""Prompts in a step that a captured graph has room for, unless fewer run at a time; a step with more runs op by op."""
GPU_DEFAULTS = {"page_size": 64, "step_tokens": 8192}
"""Of options that weren't given: kernels take a page's rows as one tile, and large steps fill a GPU."""


def resolve_options(options: EngineOptions, hardware: Hardware) -> EngineOptions:
    """The options with this hardware's own defaults in place of those that were not given."""
    if hardware.kind == "cpu":
        return options
    missing = {name: value for name, value in GPU_DEFAULTS.items() if name not in options.model_fields_set}
    return options.model_copy(update=missing)


def bucket_ladder(
    options: EngineOptions, max_context: int, hardware: Hardware, *, fillable: bool = True
) -> tuple[Bucket, ...]:
    """Buckets of rising size: decode steps by rows, then steps with prefill by tokens.

    A GPU pads to them and captures graphs of each; a CPU runs steps at their exact size and needs few. On a GPU, buckets of
    prompt tokens have room for all decode rows beside them. fillable: no more tokens than all rows together can have; a host's
    trial runs have more.
    """
    rows = options.max_running
    most = min(options.step_tokens, rows * max_context) if fillable else options.step_tokens
    most = max(most, 2)  # a bucket for queries of one token is one for decode rows
    if hardware.kind == "cpu":
        decode = sorted({min(size, rows) for size in (1, 16)} | {rows})
        bounds = [(size, size, 1) for size in decode] + [(most, min(most, rows), most)]
    else:
        decode = sorted({min(size, rows) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)} | {rows})
        prompts = sorted({size for size in PROMPT_TOKENS if size < most} | {most})
        bounds = [(size, size, 1) for size in decode]
        bounds += [(rows + size, rows + min(rows, MIXED_PROMPTS), size) for size in prompts]
    return tuple(
        Bucket(i, tokens, requests, query, max_context, requests) for i, (tokens, requests, query) in enumerate(bounds)
    )
