"""Reference models: transformers' own, on tiny configs, with every tensor randomised.

Default initialisation leaves norms, gates and biases trivial, so that a forgotten one would pass; here each gets values.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

TINY_CONFIGS = Path(__file__).parent / "tiny_configs"
FAMILIES = (
    "llama",
    "smollm2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_text_tied",
    "qwen3_5_moe_text",
    "deepseek_v3",
)
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def tiny_config(name: str) -> dict[str, Any]:
    """A tiny config by its file name."""
    config = json.loads((TINY_CONFIGS / f"{name}.json").read_text())
    config.pop("_note", None)
    return config


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every floating-point parameter and selection bias values that matter, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.named_parameters()):
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            values = torch.rand(tensor.shape, generator=generator) * 2.0
        elif leaf == "dt_bias":
            values = noise - 2.0
        elif "norm" in name and leaf == "weight":
            centre = 0.0 if not tensor.detach().abs().max() else 1.0
            values = 0.2 * noise + centre
        elif tensor.ndim >= 2:
            values = noise * (0.8 / tensor.shape[-1] ** 0.5)
        else:
            values = 0.1 * noise
        tensor.data.copy_(values)


@lru_cache(maxsize=4)
def reference_model(name: str, changes: str = "{}") -> Any:
    """transformers' model of a tiny config in float32. changes: JSON object of fields to set in the config."""
    return build_reference({**tiny_config(name), **json.loads(changes)})


def build_reference(config: dict[str, Any]) -> Any:
    """transformers' model of a config in float32, randomised."""
    import transformers

    transformers.logging.set_verbosity_error()
    kwargs = {key: value for key, value in config.items() if key != "model_type"}
    parsed = transformers.AutoConfig.for_model(config["model_type"], **kwargs)
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class._from_config(parsed, attn_implementation="eager").eval().float()
    randomise(model)
    return model


def save_checkpoint(name: str, directory: Path, **changes: Any) -> Path:
    """Write a tiny reference model as a checkpoint directory, with the config as published (not as transformers rewrites it)."""
    model = reference_model(name, json.dumps(changes, sort_keys=True))
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({**tiny_config(name), **changes}))
    return directory
