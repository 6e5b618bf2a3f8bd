"""From options to a model that can run: checkpoint, description, binding, weights, caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.cache import CachePool, PagedSpec, SlotSpec, page_bytes, slot_bytes
from firstlight.config import EngineOptions
from firstlight.engine.fallbacks import warn_of_references
from firstlight.engine.request_ops import RequestOps
from firstlight.engine.sampler import Sampler
from firstlight.engine.table import timings_of
from firstlight.errors import FirstlightError
from firstlight.hardware import Hardware, detect
from firstlight.models import CausalModel, build_model, family
from firstlight.models.activations import planned_bytes
from firstlight.models.buckets import bucket_ladder, resolve_options
from firstlight.models.config import own_dtype
from firstlight.models.registry import refuse_predicted_only
from firstlight.models.walk import bind_caches, bind_model
from firstlight.nn.module import caches
from firstlight.ops.binding import Binding
from firstlight.parallel import Mesh
from firstlight.quant import Scheme, scheme_of
from firstlight.scheduling.arena import CacheGeometry, split_arena
from firstlight.step import Bucket
from firstlight.weights.checkpoint import Checkpoint, open_checkpoint
from firstlight.weights.loader import load_weights, published_names
from firstlight.weights.random_weights import random_tensors
from firstlight.weights.stored import StoredTensor

CPU_CACHE_BYTES = 1 << 30


@dataclass(slots=True)
class BoundModel:
    """A model, bound and perhaps loaded, with everything that an executor needs.

    options: as given, with the defaults of this hardware filled in.
    planned: bytes that a GPU needs beside weights and caches (see `planned_bytes`).
    layouts: of weights that are packed for their provider, by (module path, attribute). stored: what to load.
    """

    options: EngineOptions
    model: CausalModel
    sampler: Sampler
    requests: RequestOps
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    hardware: Hardware
    mesh: Mesh
    binding: Binding
    buckets: tuple[Bucket, ...]
    max_context: int
    planned: int
    layouts: Mapping[tuple[str, str], str]
    stored: Mapping[str, StoredTensor]

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.config.vocab_size


def resolve_device(name: str) -> torch.device:
    """The device of an option; "auto" takes the first GPU if there is one. Raises FirstlightError for no device's name."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError:
        raise FirstlightError(f"--device {name!r}: there is no such device; use auto, cpu, cuda, cuda:1, ...") from None


def resolve_dtype(option: str, config: Mapping[str, Any], hardware: Hardware) -> torch.dtype:
    """Activations' dtype: the option, or the checkpoint's own (`dtype` or `torch_dtype`).

    A checkpoint that names none (GGUF) runs in bfloat16 where the hardware multiplies it, else in float32.
    """
    name = own_dtype(config) if option == "auto" else option
    if name is None:
        return torch.bfloat16 if hardware.kind != "cpu" or hardware.has("avx512_bf16") else torch.float32
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise FirstlightError(f"config.json: dtype {name!r} can't be run; use --dtype float32, bfloat16 or float16")
    return dtype


def resolve_cache_dtype(option: str, default: torch.dtype) -> torch.dtype:
    """The dtype of what is kept between steps: the option; `default` for "auto"."""
    return default if option == "auto" else getattr(torch, option)


def refuse_cache_dtypes(options: EngineOptions, model: CausalModel, model_type: object) -> None:
    """Raises FirstlightError if FP8 pages would hold anything but keys and values of heads, or if there are no states for
    --state-dtype."""
    specs = caches(model)
    if options.state_dtype == "bfloat16" and not any(isinstance(spec, SlotSpec) for spec in specs.values()):
        raise FirstlightError(
            f"--state-dtype bfloat16: {model_type} keeps no recurrent states, only KV; leave the option out"
        )
    for path, spec in specs.items():
        if isinstance(spec, PagedSpec) and spec.dtype == torch.float8_e4m3fn and spec.names != ("k", "v"):
            raise FirstlightError(
                f"--kv-dtype float8_e4m3fn: {path} keeps {', '.join(spec.names)} of latent attention, and FP8 pages are served for "
                "keys and values of heads alone; use --kv-dtype auto"
            )


def bind_only(
    options: EngineOptions,
    mesh: Mesh | None = None,
    device: torch.device | None = None,
    hardware: Hardware | None = None,
) -> BoundModel:
    """Build and bind the model of the options for one rank, on the meta device; reads no weights.

    hardware: bind for this description rather than for the device that is here.
    Raises FirstlightError or ValueError, with a message for people, for anything wrong with the checkpoint or options.
    """
    mesh = mesh or Mesh()
    device = device or resolve_device(options.device)
    hardware = hardware or detect(str(device))
    options = resolve_options(options, hardware)
    checkpoint = open_checkpoint(options.model)
    config = checkpoint.config
    refuse_predicted_only(config, options.model)
    dtype = resolve_dtype(options.dtype, config, hardware)
    known = checkpoint.has_weights and options.weights != "random"
    stored = published_names(family(config), checkpoint.tensors) if known else {}
    scheme = _scheme(config, dtype, stored) if known else scheme_of(config, dtype)
    model = build_model(
        config,
        dtype=dtype,
        mesh=mesh,
        scheme=scheme,
        cache_dtype=resolve_cache_dtype(options.kv_dtype, dtype),
        state_dtype=resolve_cache_dtype(options.state_dtype, torch.float32),
    )
    refuse_cache_dtypes(options, model, config.get("model_type"))
    limit = model.config.max_position_embeddings
    if options.max_context > limit:
        raise FirstlightError(f"--max-context {options.max_context} is more than the model's own limit of {limit}")
    buckets = bucket_ladder(options, options.max_context or limit, hardware)
    sampler, requests = Sampler(), RequestOps()
    more = sampler.records(buckets, model.config.vocab_size, dtype, hardware)
    more += requests.records(buckets, model.position_rows, options.page_size, hardware)
    binding, layouts = bind_model(
        model,
        buckets,
        hardware,
        overrides=options.op,
        invariant=options.invariant,
        page_size=options.page_size,
        more=more,
        timings=timings_of(options.table, hardware),
    )
    return BoundModel(
        options,
        model,
        sampler,
        requests,
        checkpoint,
        device,
        dtype,
        hardware,
        mesh,
        binding,
        buckets,
        options.max_context or limit,
        planned_bytes(model, buckets, page_size=options.page_size) + binding.workspace if hardware.kind != "cpu" else 0,
        layouts,
        stored,
    )


def load_model(options: EngineOptions, mesh: Mesh | None = None, device: torch.device | None = None) -> BoundModel:
    """Build, bind and load the model of the options on one rank. Raises what `bind_only` does."""
    if options.threads and resolve_device(options.device).type == "cpu":
        torch.set_num_threads(options.threads)
    bound = bind_only(options, mesh, device)
    refuse_missing_weights(options, bound.checkpoint)
    warn_of_references(bound.model, bound.hardware)
    if options.weights == "random":
        bound.stored = random_tensors(bound.model, options.seed, bound.device)
    load_weights(bound.model, bound.stored, bound.device, bound.layouts)
    bound.stored = {}
    return bound


def refuse_missing_weights(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises FirstlightError for a checkpoint without weights, unless the options ask for random ones."""
    if options.weights != "random" and not checkpoint.has_weights:
        raise FirstlightError(f"{options.model}: no weights here; for random ones say --weights random")


def _scheme(config: Mapping[str, Any], dtype: torch.dtype, stored: Mapping[str, StoredTensor]) -> Scheme:
    """The scheme that the stored tensors declare."""
    types = {name: tensor.ggml_type for name, tensor in stored.items() if tensor.ggml_type}
    if types:
        packed = {n: kind if getattr(stored[n], "can_stay_packed", False) else "F32" for n, kind in types.items()}
        return scheme_of(config, dtype, ggml_types=packed)
    return scheme_of(config, dtype, stored={name: tensor.dtype for name, tensor in stored.items()})


def cache_bytes(options: EngineOptions, loaded: BoundModel) -> int:
    """Bytes for pages and slots: as asked, or what the device has left. Raises FirstlightError if it hasn't as much."""
    asked = int(options.cache_gib * (1 << 30))
    if loaded.device.type == "cpu":
        return asked or CPU_CACHE_BYTES
    with torch.cuda.device(loaded.device):
        torch.cuda.empty_cache()  # what loading freed counts as free
    free, _ = torch.cuda.mem_get_info(loaded.device)
    left = free - loaded.planned
    if left <= 0 or asked > left:
        wanted = f"--cache-gib {options.cache_gib:g}" if asked else "a cache"
        raise FirstlightError(
            f"{loaded.device} has {free / 2**30:.1f} GiB free beside the weights, and steps need {loaded.planned / 2**30:.1f} "
            f"of them: no room for {wanted}; lower --step-tokens, --max-running or --cache-gib, or free the GPU"
        )
    return asked or left


def cache_geometry(options: EngineOptions, loaded: BoundModel, memory: int | None = None) -> CacheGeometry:
    """How the cache's memory is split. memory: bytes; None: `cache_bytes`. Raises FirstlightError if it can't hold one request."""
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
            cache_bytes(options, loaded) if memory is None else memory,
            page_size=options.page_size,
            page_bytes=page_bytes(specs, options.page_size),
            slot_bytes=slot_bytes(specs),
            max_running=options.max_running,
            max_context=loaded.max_context,
            checkpoint_bytes=checkpoint_bytes(options),
            token_flops=2.0 * weights,
            pair_flops=4.0 * attention * config.num_attention_heads * config.head_dim,
        )
    except ValueError as error:
        raise FirstlightError(f"--cache-gib: {error}") from None


def checkpoint_bytes(options: EngineOptions) -> int | None:
    """Of the caches, at most this for checkpoints; None: half. Without a prefix cache nobody would read one."""
    if not options.prefix_cache:
        return 0
    return int(options.checkpoint_gib * (1 << 30)) or None


def allocate_caches(loaded: BoundModel, geometry: CacheGeometry) -> CachePool:
    """The pools of a geometry, bound to the model; one more row each for the null page and slot.

    Raises FirstlightError if the device has no such memory.
    """
    try:
        pool = CachePool(
            caches(loaded.model),
            pages=geometry.pages + 1,
            slots=geometry.slots + 1 if geometry.has_state else 0,
            page_size=geometry.page_size,
            device=loaded.device,
        )
    except RuntimeError as error:  # an allocator's; torch's own OutOfMemoryError is one
        memory = (geometry.pages + 1) * geometry.page_bytes + geometry.slots * geometry.slot_bytes
        raise FirstlightError(
            f"--cache-gib: {loaded.device} can't give {memory / 2**30:.1f} GiB for pages and state slots; ask for less"
        ) from error
    bind_caches(loaded.model, pool)
    return pool
