"""From options to a model that can run: checkpoint, description, binding, weights, caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.cache import CachePool, PagedSpec, page_bytes, slot_bytes
from firstlight.config import EngineOptions
from firstlight.errors import FirstlightError
from firstlight.hardware import Hardware, detect
from firstlight.models import CausalModel, build_model, family
from firstlight.models.config import text_section
from firstlight.models.walk import bind_caches, bind_model
from firstlight.nn.module import caches
from firstlight.ops.binding import Binding
from firstlight.parallel import Mesh
from firstlight.quant import scheme_of
from firstlight.scheduling.arena import CacheGeometry, split_arena
from firstlight.step import Bucket
from firstlight.weights.checkpoint import Checkpoint, open_checkpoint
from firstlight.weights.loader import load_weights, published_names
from firstlight.weights.random_weights import random_tensors
from firstlight.weights.stored import StoredTensor

CPU_CACHE_BYTES = 1 << 30
DEVICE_SHARE = 0.9
"""Of a GPU's free memory after loading; the rest is for activations and the libraries' own."""


@dataclass(slots=True)
class LoadedModel:
    """A model on its device, with everything that an executor needs."""

    model: CausalModel
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    hardware: Hardware
    mesh: Mesh
    binding: Binding
    buckets: tuple[Bucket, ...]
    max_context: int

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.config.vocab_size


def resolve_device(name: str) -> torch.device:
    """The device of an option; "auto" takes the first GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(option: str, config: Mapping[str, Any]) -> torch.dtype:
    """Activations' dtype: the option, or the checkpoint's own (`dtype` or `torch_dtype`), or float32."""
    text = text_section(config)
    name = option if option != "auto" else str(text.get("dtype") or text.get("torch_dtype") or "float32")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise FirstlightError(f"config.json: dtype {name!r} can't be run; use --dtype float32, bfloat16 or float16")
    return dtype


def bucket_ladder(options: EngineOptions, max_context: int) -> tuple[Bucket, ...]:
    """Buckets of rising size: decode steps of up to 1, 8, 32, 128, ... rows, then steps with prefill."""
    rows = sorted({min(size, options.max_running) for size in (1, 8, 32, 128, 512, 2048, options.max_running)})
    rows = [size for size in rows if size <= options.max_running]
    bounds = [(size, size, 1) for size in rows]
    tokens = sorted({size for size in (32, 256, 2048, 8192) if size < options.step_tokens} | {options.step_tokens})
    bounds += [(size, options.max_running, size) for size in tokens]
    return tuple(
        Bucket(i, tokens, requests, query, max_context, requests) for i, (tokens, requests, query) in enumerate(bounds)
    )


def load_model(options: EngineOptions, mesh: Mesh | None = None, device: torch.device | None = None) -> LoadedModel:
    """Build, bind and load the model of the options on one rank.

    Raises FirstlightError or ValueError, with a message for people, for anything wrong with the checkpoint or options.
    """
    mesh = mesh or Mesh()
    device = device or resolve_device(options.device)
    if options.threads and device.type == "cpu":
        torch.set_num_threads(options.threads)
    hardware = detect(str(device))
    checkpoint = open_checkpoint(Path(options.model))
    config = checkpoint.config
    dtype = resolve_dtype(options.dtype, config)
    random = options.weights == "random"
    if not random and not checkpoint.has_weights:
        raise FirstlightError(f"{options.model}: no weights here; for random ones say --weights random")
    stored = {} if random else published_names(family(config), checkpoint.tensors)
    model = build_model(config, dtype=dtype, mesh=mesh, scheme=_scheme(config, dtype, stored, random))
    limit = model.config.max_position_embeddings
    if options.max_context > limit:
        raise FirstlightError(f"--max-context {options.max_context} is more than the model's own limit of {limit}")
    max_context = options.max_context or limit
    buckets = bucket_ladder(options, max_context)
    binding, layouts = bind_model(
        model, buckets, hardware, overrides=options.op, invariant=options.invariant, page_size=options.page_size
    )
    if random:
        stored = random_tensors(model, options.seed, device)
    load_weights(model, stored, device, layouts)
    return LoadedModel(model, checkpoint, device, dtype, hardware, mesh, binding, buckets, max_context)


def _scheme(config: Mapping[str, Any], dtype: torch.dtype, stored: Mapping[str, StoredTensor], random: bool) -> Any:
    if random:
        return scheme_of(config, dtype)
    types = {name: tensor.ggml_type for name, tensor in stored.items() if tensor.ggml_type}
    if types:
        packed = {n: kind if getattr(stored[n], "can_stay_packed", False) else "F32" for n, kind in types.items()}
        return scheme_of(config, dtype, ggml_types=packed)
    return scheme_of(config, dtype, stored={name: tensor.dtype for name, tensor in stored.items()})


def cache_bytes(options: EngineOptions, loaded: LoadedModel) -> int:
    """Bytes for pages and slots: as asked, or what the device has left."""
    if options.cache_gib:
        return int(options.cache_gib * (1 << 30))
    if loaded.device.type == "cpu":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(loaded.device)
    return int(free * DEVICE_SHARE) - loaded.binding.workspace


def cache_geometry(options: EngineOptions, loaded: LoadedModel) -> CacheGeometry:
    """How the cache's memory is split. Raises FirstlightError if it can't hold one request."""
    specs = list(caches(loaded.model).values())
    config = loaded.model.config
    attention = sum(isinstance(spec, PagedSpec) for spec in specs)
    weights = sum(
        torch.Size(spec.shape).numel() * (config.num_experts_per_tok / config.num_experts if spec.experts else 1)
        for module in loaded.model.modules()
        for spec in getattr(module, "weight_specs", {}).values()
    )
    try:
        return split_arena(
            cache_bytes(options, loaded),
            page_size=options.page_size,
            page_bytes=page_bytes(specs, options.page_size),
            slot_bytes=slot_bytes(specs),
            max_running=options.max_running,
            checkpoint_bytes=int(options.checkpoint_gib * (1 << 30)),
            token_flops=2.0 * weights,
            pair_flops=4.0 * attention * config.num_attention_heads * config.head_dim,
        )
    except ValueError as error:
        raise FirstlightError(f"--cache-gib: {error}") from None


def allocate_caches(loaded: LoadedModel, geometry: CacheGeometry) -> CachePool:
    """The pools of a geometry, bound to the model; one more row each for the null page and slot."""
    pool = CachePool(
        caches(loaded.model),
        pages=geometry.pages + 1,
        slots=geometry.slots + 1 if geometry.has_state else 0,
        page_size=geometry.page_size,
        device=loaded.device,
    )
    bind_caches(loaded.model, pool)
    return pool
