"""A tiny hybrid in FP8 whose tensors can all be handed over packed, and steps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from reference import tiny_config

from firstlight.cache import CachePool
from firstlight.hardware import Hardware
from firstlight.models import CausalModel, build_model
from firstlight.models.walk import bind_caches, bind_model
from firstlight.nn.module import caches
from firstlight.quant import scheme_of
from firstlight.step import Bucket, PageTable, SlotTable, StepBatch, Table, token_slots
from firstlight.weights.loader import load_weights
from firstlight.weights.random_weights import random_tensors

PAGE = 16
SIZES: Mapping[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}  # fmt: skip
"""Everything in whole blocks of 128; a layer of each kind with a dense MLP."""


def float8_config(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    return {**tiny_config("qwen3_5_text"), **SIZES, **changes}


def float8_model(
    buckets: Sequence[Bucket], hardware: Hardware, device: str, *, pages: int = 20, slots: int = 9, **changes: Any
) -> CausalModel:
    """The model, bound for described hardware, with random weights and caches on a device. pages: of the pool, page 0 included."""
    config = float8_config(**changes)
    model = build_model(config, dtype=torch.bfloat16, scheme=scheme_of(config, torch.bfloat16))
    _, layouts = bind_model(model, buckets, hardware, page_size=PAGE)
    load_weights(model, random_tensors(model, 0, device), torch.device(device), layouts)
    bind_caches(model, CachePool(caches(model), pages=pages, slots=slots, page_size=PAGE, device=device))
    return model


def fill_caches(model: CausalModel, seed: int = 0) -> list[torch.Tensor]:
    """Put the same numbers into all pages and slots; returns the pools."""
    generator = torch.Generator().manual_seed(seed)
    pools = [
        tensor
        for module in model.modules()
        for name, tensor in sorted(vars(module).items())
        if name in ("k_pages", "v_pages", "conv_pool", "state_pool")
    ]
    for pool in pools:
        pool.copy_(torch.randn(pool.shape, generator=generator) * 0.3)
    return pools


def mixed_step(bucket: Bucket, contexts: Sequence[int], prompts: Sequence[int], device: str) -> StepBatch:
    """Rows that decode behind so many tokens, then prompts of so many; each has a slot and pages of its own, for the longest."""
    counts = [1] * len(contexts) + list(prompts)
    lengths = [context + 1 for context in contexts] + list(prompts)
    requests, tokens = len(counts), sum(counts)

    def integers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    per_request = -(-max(lengths) // PAGE)
    pages = torch.zeros(requests + 1, per_request, dtype=torch.int32)
    pages[1:] = 1 + torch.arange(requests * per_request).view(requests, -1)
    pages = pages.to(device)
    rows = integers(range(1, requests + 1))
    request = torch.repeat_interleave(torch.arange(requests), torch.tensor(counts)).to(device)
    index = torch.cat([torch.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)])
    index = index.to(device)
    slot = token_slots(pages, rows, request, index, PAGE)
    starts = integers([0, *torch.tensor(counts).cumsum(0).tolist()])
    state_in = integers([i + 1 if i < len(contexts) else 0 for i in range(requests)])
    tables: dict[str, Table] = {
        "attention": PageTable(pages, rows, slot, PAGE),
        "state": SlotTable(state_in, integers(range(1, requests + 1)), integers([]).view(0, 3)),
    }
    decodes = len(contexts)
    none = integers([0] * requests)
    return StepBatch(
        bucket, torch.arange(3, 3 + tokens, device=device), index.expand(3, -1).contiguous(), starts, integers(lengths),
        none, none, torch.arange(tokens, device=device), integers([tokens]), tables, decodes, decodes,
        max(counts), max(lengths),
    )  # fmt: skip
