"""From a config.json to its family."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from firstlight.models.causal import CausalModel
from firstlight.models.config import ConfigError
from firstlight.nn.module import Build
from firstlight.parallel import Mesh
from firstlight.quant import Scheme

FAMILIES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "kimi_k2": "deepseek_v3",
    "kimi_linear": "kimi_linear",
    "gpt_oss": "gpt_oss",
}
"""`model_type` -> the file of its family."""

PREDICTED_ONLY = frozenset({"deepseek_v32", "kimi_linear", "gpt_oss"})
"""Those that can be predicted, but not run yet: the engine gives every layer the same pages, and these keep more than one kind
of row, or some op of theirs has shapes and costs only."""


def refuse_predicted_only(config: Mapping[str, Any], path: str) -> None:
    """Raises ConfigError, naming the checkpoint's path, for a family that can't be run yet."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in PREDICTED_ONLY:
        raise ConfigError(
            f"{path}: models of type {model_type!r} can be predicted (firstlight explain), not run yet; "
            f"these run: {', '.join(sorted(FAMILIES.keys() - PREDICTED_ONLY))}"
        )


def family(config: Mapping[str, Any]) -> type[CausalModel]:
    """The model class of a config. Raises ConfigError, listing what is supported."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    model: type[CausalModel] = import_module(f"firstlight.models.{FAMILIES[model_type]}").Model
    return model


def build_model(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    mesh: Mesh | None = None,
    scheme: Scheme | None = None,
    cache_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype = torch.float32,
) -> CausalModel:
    """The model of a config on the meta device, for one rank of a mesh. Weights are loaded, or drawn, afterwards.

    Raises ConfigError, or ValueError where the mesh can't split it.
    """
    build = Build(mesh or Mesh(), dtype, scheme or Scheme(dtype), cache_dtype or dtype, state_dtype)
    return family(config)(config, build).eval()
