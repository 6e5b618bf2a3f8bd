"""Build transformers' model from a config and stored tensors, whatever form these are stored in.

transformers can't run every form (GGUF blocks, FP8 blocks on a CPU) and the question here is the computation, not the way of
storing: so each parameter gets the values that the stored tensors stand for, in float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from firstlight.errors import CheckpointError, FirstlightError
from firstlight.models import family
from firstlight.quant import SCALE_SUFFIX, BlockFp8, scheme_of
from firstlight.quant.blocks import expand_scale
from firstlight.weights.stored import StoredTensor

STACK = re.compile(r"\.experts\.(gate_up|down)_proj$")


def build_reference(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], device: torch.device) -> Any:
    """transformers' model in float32 with eager attention, in evaluation mode.

    config: a config.json. tensors: by the names that `published_names` gives.
    Raises CheckpointError for a parameter that no tensor fills, FirstlightError if transformers doesn't know the model or refuses its config.
    """
    import transformers
    from transformers.initialization import no_init_weights

    kind = _model_class(transformers, config)
    with silenced(), no_init_weights(), torch.device(device):
        try:
            model = kind._from_config(_parsed(transformers, config), attn_implementation="eager", dtype=torch.float32)
        except Exception as error:  # whatever its checks of a config raise; nothing of ours runs here
            reason = " ".join(str(error).split())
            raise FirstlightError(
                f"transformers {transformers.__version__}, the reference, can't make a model of this config.json: {reason}"
            ) from error
    model.tie_weights()
    fill(model, config, tensors)
    return model.float().eval()


@contextmanager
def silenced() -> Iterator[None]:
    """Without transformers' advice on packages that would make it faster."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _parsed(transformers: Any, config: Mapping[str, Any]) -> Any:
    left_out = ("model_type", "quantization_config", "architectures")
    return transformers.AutoConfig.for_model(
        config["model_type"], **{key: value for key, value in config.items() if key not in left_out}
    )


def _model_class(transformers: Any, config: Mapping[str, Any]) -> Any:
    for name in config.get("architectures") or ():
        if isinstance(name, str) and (found := getattr(transformers, name, None)) is not None:
            return found
    model_type = config["model_type"]
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in mapping:
        raise FirstlightError(
            f"transformers {transformers.__version__} has no model for model_type {model_type!r} "
            f"(architectures {config.get('architectures')!r}); there is nothing to compare with"
        )
    return getattr(transformers, mapping[model_type])


def fill(model: Any, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Give every parameter, and every buffer that is stored, the values of its tensor. Raises CheckpointError."""
    scheme = scheme_of(config, torch.float32, stored={name: tensor.dtype for name, tensor in tensors.items()})
    block = scheme.block if isinstance(scheme, BlockFp8) else (1, 1)
    with torch.no_grad():
        stored = model.state_dict(keep_vars=True)  # has tied parameters twice, which named_parameters has once
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
        for published, parameter in {**dict(model.named_parameters()), **buffers}.items():
            name = _our_name(family(config).renames, published)
            values = _values(tensors, name, len(parameter), block)
            if values is None:
                raise CheckpointError(f"tensor {name} is missing from the checkpoint; transformers' model needs it")
            if values.numel() != parameter.numel():
                raise CheckpointError(
                    f"tensor {name} has shape {list(values.shape)}; transformers' model needs {list(parameter.shape)}"
                )
            parameter.copy_(values.reshape(parameter.shape))


def _our_name(renames: Sequence[tuple[str, str]], published: str) -> str:
    """A published name as `published_names` renames it."""
    for prefix, own in renames:
        if published.startswith(prefix):
            return own + published.removeprefix(prefix)
    return published


def _values(
    tensors: Mapping[str, StoredTensor], name: str, experts: int, block: tuple[int, int]
) -> torch.Tensor | None:
    """The values of a parameter, float32, stacked where the checkpoint has a tensor for each expert; None if missing."""
    if name in tensors:
        return _dequantised(tensors, name, block)
    if not STACK.search(name):
        return None
    prefix = name.rpartition(".")[0]
    parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
    stacked = []
    for expert in range(experts):
        names = [f"{prefix}.{expert}.{part}_proj.weight" for part in parts]
        if any(part not in tensors for part in names):
            return None
        stacked.append(torch.cat([_dequantised(tensors, part, block) for part in names]))
    return torch.stack(stacked)


def _dequantised(tensors: Mapping[str, StoredTensor], name: str, block: tuple[int, int]) -> torch.Tensor:
    """The values that a tensor stands for: with a scale for each block beside it, element * scale."""
    values = tensors[name].load().float()
    if name + SCALE_SUFFIX not in tensors:
        return values
    scale = tensors[name + SCALE_SUFFIX].load().float().to(values.device)
    return values * expand_scale(scale, tuple(values.shape), block)
