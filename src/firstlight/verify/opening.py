"""Open what is to be verified: a checkpoint, or a config with random weights, with as many layers as memory holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from firstlight.errors import FirstlightError
from firstlight.hardware import detect
from firstlight.models import CausalModel, build_model, family
from firstlight.models.config import own_dtype
from firstlight.models.registry import refuse_predicted_only
from firstlight.models.walk import LAYER, bind_model
from firstlight.nn.module import Module
from firstlight.quant import Scheme, nbytes, scheme_of
from firstlight.verify.candidate import BUCKETS, PAGE_SIZE
from firstlight.verify.run import Subject
from firstlight.weights.checkpoint import open_checkpoint
from firstlight.weights.loader import load_weights, published_names
from firstlight.weights.random_weights import random_tensors
from firstlight.weights.stored import StoredTensor

MEMORY_SHARE = 0.75
"""Of the memory that is free; the rest is for activations and the reference's records."""
REFERENCE_BYTES = 4
"""Bytes a weight takes in the reference, which is float32."""


def open_subject(
    path: str,
    *,
    random: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    layers: int = 0,
    overrides: Sequence[str] = (),
) -> Subject:
    """The model at a path, ready to be verified.

    path: as `open_checkpoint` takes it. random: draw weights, seeded. device: "auto" takes the first GPU if there is one.
    dtype: of activations; "auto": float32 on a CPU, the checkpoint's own on a GPU. layers: how many, from the first; 0: as
    many as fit into memory beside the reference. overrides: `OP=PROVIDER`.
    Raises FirstlightError, ConfigError, BindingError or RuntimeError, with messages for people.
    """
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    hardware = detect(str(place))
    checkpoint = open_checkpoint(path)
    refuse_predicted_only(checkpoint.config, path)
    kind = _dtype(dtype, checkpoint.config, place)
    if not random and not checkpoint.has_weights:
        raise FirstlightError(f"{path}: no weights here; for random ones say --weights random")
    tensors = {} if random else published_names(family(checkpoint.config), checkpoint.tensors)
    scheme = _scheme(checkpoint.config, kind, tensors, random)
    config = _cut(checkpoint.config, build_model(checkpoint.config, dtype=kind, scheme=scheme), layers, place)
    model = build_model(config, dtype=kind, scheme=scheme)
    count = model.config.num_hidden_layers
    tensors = {name: tensor for name, tensor in tensors.items() if _layer(name) < count}
    _, layouts = bind_model(model, BUCKETS, hardware, overrides=overrides, page_size=PAGE_SIZE)
    if random:
        tensors = random_tensors(model, seed, place)
    load_weights(model, tensors, place, layouts)
    return Subject(model, config, tensors, place, kind, seed)


def _dtype(name: str, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else own_dtype(config) or "float32"
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise FirstlightError(f"dtype {name!r} can't be verified; use --dtype float32, bfloat16 or float16")
    return dtype


def _scheme(config: Mapping[str, Any], dtype: torch.dtype, tensors: Mapping[str, StoredTensor], random: bool) -> Scheme:
    """The formats of weights, as a server would keep them."""
    if random:
        return scheme_of(config, dtype)
    types = {name: tensor.ggml_type for name, tensor in tensors.items() if tensor.ggml_type}
    if types:
        packed = {n: kind if getattr(tensors[n], "can_stay_packed", False) else "F32" for n, kind in types.items()}
        return scheme_of(config, dtype, ggml_types=packed)
    return scheme_of(config, dtype, stored={name: tensor.dtype for name, tensor in tensors.items()})


def _layer(name: str) -> int:
    """The layer that a tensor belongs to, or -1."""
    match = LAYER.match(name)
    return int(match[1]) if match else -1


def _cut(config: Mapping[str, Any], model: CausalModel, layers: int, device: torch.device) -> dict[str, Any]:
    """The config with its first `layers` layers, or with those that fit. model: the whole one, on the meta device."""
    total = model.config.num_hidden_layers
    if not 0 <= layers <= total:
        raise FirstlightError(
            f"--layers {layers}: the model has {total} layers; give 1 to {total}, or 0 for as many as fit"
        )
    count = layers or _fitting_layers(model, _free_bytes(device))
    text = dict(config["text_config"]) if isinstance(config.get("text_config"), Mapping) else dict(config)
    text["num_hidden_layers"] = count
    if text.get("layer_types"):
        text["layer_types"] = list(text["layer_types"])[:count]
    return {**config, "text_config": text} if "text_config" in config else text


def _fitting_layers(model: CausalModel, free: int) -> int:
    """How many layers fit into `free` bytes twice: as ours, and as the reference. Raises FirstlightError if none does."""
    sizes: dict[int, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, Module):
            layer = _layer(f"{path}.")
            for attribute, spec in module.weight_specs.items():
                reference = REFERENCE_BYTES * torch.Size(spec.shape).numel()
                sizes[layer] = sizes.get(layer, 0) + nbytes(getattr(module, attribute)) + reference
    fixed = sizes.pop(-1, 0)
    room = free * MEMORY_SHARE - fixed
    if room < sizes[0]:
        raise FirstlightError(
            f"not even one layer fits: it and its reference need {(fixed + sizes[0]) / MEMORY_SHARE / 2**30:.1f} GiB, "
            f"and {free / 2**30:.1f} GiB are free"
        )
    count = 0
    while count < len(sizes) and room >= sizes[count]:
        room -= sizes[count]
        count += 1
    return count


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 << 30
