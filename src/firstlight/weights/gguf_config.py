"""A GGUF file's metadata as the config.json that the same model has on the Hugging Face hub."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from firstlight.errors import CheckpointError
from firstlight.quant.gguf_blocks import dequantize
from firstlight.weights.gguf_file import GgufFile
from firstlight.weights.stored import bytes_at

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that llama files have instead of rope scaling metadata: what each rotary frequency is divided by."""

LARGEST_SIZE, MOST_LAYERS, MOST_HEADS = 2**31 - 1, 4096, 65536
"""A file is untrusted: lists are made of its layers and heads, so what is beyond these is refused first."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of Llama 3's rope scaling, the same in every published model; the factor differs (8 or 32)."""


class _Metadata:
    """Typed reads of one architecture's metadata; errors name the file and the key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.prefix = architecture + "."

    def count(self, key: str, default: int | None = None, most: int = LARGEST_SIZE) -> int:
        """A positive integer up to `most`. One value per layer is accepted where all are equal."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) is not int or not 0 < value <= most:
            raise CheckpointError(
                f"{self.file.path}: metadata {self.prefix}{key}: {value!r} is not a positive integer up to {most}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self.file.path}: metadata {self.prefix}{key}: {value!r} is not a positive number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.file.path}: metadata {self.prefix}{key}: {value!r} is not a string")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.file.metadata.get(self.prefix + key, default)
        if value is None:
            raise CheckpointError(f"{self.file.path}: metadata {self.prefix}{key} is missing")
        return value


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The configuration of a GGUF file's model, with `gguf_architecture` beside Hugging Face's own keys.

    Raises CheckpointError, naming the file and the key, if metadata is missing or not of its kind, or if the
    architecture is not supported.
    """
    architecture = file.metadata.get("general.architecture")
    build = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if build is None:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    metadata = _Metadata(file, str(architecture))
    config = {"gguf_architecture": architecture, **_common(metadata), **build(metadata)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if type(token := file.metadata.get(f"tokenizer.ggml.{key}_token_id")) is int:
            config[f"{name}_token_id"] = token
    return config


def _common(metadata: _Metadata) -> dict[str, Any]:
    """What all decoder-only architectures say in the same words."""
    heads = metadata.count("attention.head_count", most=MOST_HEADS)
    hidden = metadata.count("embedding_length")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": metadata.count("block_count", most=MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": metadata.count("attention.key_length", max(hidden // heads, 1)),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.count("context_length"),
        "vocab_size": metadata.count(
            "vocab_size", len(metadata.file.metadata.get("tokenizer.ggml.tokens", ())) or None
        ),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in metadata.file.entries,
        "tie_word_embeddings": "output.weight" not in metadata.file.entries,
    }


def _llama(metadata: _Metadata) -> dict[str, Any]:
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    head_dim = metadata.count("attention.key_length", metadata.count("rope.dimension_count", max(hidden // heads, 1)))
    theta = metadata.number("rope.freq_base", 10000.0)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": metadata.count("feed_forward_length"),
        "head_dim": head_dim,
        "mlp_bias": "blk.0.ffn_gate.bias" in metadata.file.entries,
        "rope_theta": theta,
        "rope_scaling": _llama3_scaling(metadata.file, theta, head_dim) or _rope_scaling(metadata),
    }


def _qwen3(metadata: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "intermediate_size": metadata.count("feed_forward_length"),
        "rope_theta": metadata.number("rope.freq_base"),
        "rope_scaling": _rope_scaling(metadata),
    }


def _qwen3_moe(metadata: _Metadata) -> dict[str, Any]:
    expert_width = metadata.count("expert_feed_forward_length")
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": metadata.count("feed_forward_length", expert_width),
        "moe_intermediate_size": expert_width,
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": metadata.number("rope.freq_base"),
        "rope_scaling": _rope_scaling(metadata),
    }


def _qwen3_5(metadata: _Metadata) -> dict[str, Any]:
    """Qwen3.5: the file counts the multi-token-prediction blocks as layers; the configuration doesn't."""
    value_heads = metadata.count("ssm.time_step_rank", most=MOST_HEADS)
    sections = metadata.file.metadata.get(metadata.prefix + "rope.dimension_sections")
    if not isinstance(sections, np.ndarray) or sections.dtype.kind not in "iu":
        raise CheckpointError(f"{metadata.file.path}: metadata {metadata.prefix}rope.dimension_sections is missing")
    blocks = metadata.count("block_count", most=MOST_LAYERS)
    prediction_layers = metadata.file.metadata.get(metadata.prefix + "nextn_predict_layers", 0)
    if type(prediction_layers) is not int or not 0 <= prediction_layers < blocks:
        raise CheckpointError(
            f"{metadata.file.path}: metadata {metadata.prefix}nextn_predict_layers: {prediction_layers!r} is not a number "
            f"of blocks below {blocks}"
        )
    layers = blocks - prediction_layers
    interval = metadata.count("full_attention_interval", 4)
    config = {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)],
        "full_attention_interval": interval,
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.count("ssm.state_size", most=MOST_HEADS),
        "linear_num_key_heads": metadata.count("ssm.group_count", most=MOST_HEADS),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": metadata.count("ssm.inner_size") // value_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata.number("rope.freq_base"),
            "mrope_section": [int(section) for section in sections if section],
            "mrope_interleaved": True,
            "partial_rotary_factor": metadata.count("rope.dimension_count") / metadata.count("attention.key_length"),
        },
    }
    if metadata.prefix + "feed_forward_length" in metadata.file.metadata:
        config["intermediate_size"] = metadata.count("feed_forward_length")
    return config


def _qwen3_5_moe(metadata: _Metadata) -> dict[str, Any]:
    return {
        **_qwen3_5(metadata),
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
    }


ARCHITECTURES: dict[str, Callable[[_Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
}


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    """Rope scaling that the metadata declares, in the words of config.json."""
    kind = metadata.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
        }
    raise CheckpointError(
        f"{metadata.file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn"
    )


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What Llama 3's rope scaling divides each of the head_dim / 2 frequencies by: float64 [head_dim / 2]."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original = LLAMA3_ROPE["original_max_position_embeddings"]
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's rope scaling, recognised in the tensor of its factors; None if the file has no such tensor."""
    entry = file.entries.get(ROPE_FACTORS)
    if entry is None:
        return None
    if entry.ggml_type == "F32" and entry.shape == (head_dim // 2,):
        raw = bytes_at(file.mapped, entry.start, entry.start + entry.nbytes)
        stored = dequantize(raw, entry.ggml_type, torch.float64).numpy()
        factor = round(float(stored.max()), 4)
        if factor >= 1 and np.allclose(stored, llama3_factors(theta, head_dim, factor), rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    raise CheckpointError(
        f"{file.path}: the rotary factors in {ROPE_FACTORS} are not those of Llama 3's rope scaling, "
        f"the only kind that is supported"
    )
