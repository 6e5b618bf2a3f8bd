"""A checkpoint's config.json as typed data: every published spelling, read once.

Text fields may be nested under `text_config`; rotary settings come as `rope_parameters` (transformers 5) or as
`rope_theta` + `rope_scaling` (4 and earlier). A missing or impossible value is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.nn.rope import Rope

FULL_ATTENTION, LINEAR_ATTENTION = "full_attention", "linear_attention"
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class ConfigError(ValueError):
    """A config.json that can't be run; the message names the field, the value and what is legal."""


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Sizes of a text model. Fields keep the names of config.json where those say what they are."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: Rope
    layer_types: tuple[str, ...]
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    sparse_layers: tuple[bool, ...] = ()
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0


class Reader:
    """Reads fields of a config, with errors that say what is wrong."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number >= least. Raises ConfigError."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"config.json: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"config.json: {name} is {value!r}; it must be a whole number of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number > 0. Raises ConfigError."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"config.json: {name} is {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false. Raises ConfigError."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} is {value!r}; it must be true or false")
        return value


def text_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model, wherever they are: nested ones win over the outer ones."""
    nested = raw.get("text_config")
    if nested is None:
        return dict(raw)
    if not isinstance(nested, Mapping):
        raise ConfigError(f"config.json: text_config is {type(nested).__name__}; it must be an object")
    outer = {key: value for key, value in raw.items() if key not in ("text_config", "vision_config")}
    return {**outer, **nested}


def parse_rope(text: Mapping[str, Any], head_dim: int) -> Rope:
    """Rotary settings in either spelling. Raises ConfigError for a kind that isn't known."""
    section = dict(text.get("rope_scaling") or {})
    section.update(text.get("rope_parameters") or {})
    if FULL_ATTENTION in section:  # one setting a layer type; ours have rotary embeddings in full attention only
        section = dict(section[FULL_ATTENTION])
    merged = Reader({**{key: text[key] for key in ("rope_theta", "partial_rotary_factor") if key in text}, **section})
    kind = section.get("rope_type", section.get("type", "default")) or "default"
    if kind == "mrope":
        kind = "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    dim = int(head_dim * merged.number("partial_rotary_factor", 1.0))
    sections = section.get("mrope_section")
    if sections is not None:
        if len(sections) != 3 or sum(sections) != dim // 2:
            raise ConfigError(f"config.json: mrope_section {sections} must be three numbers that sum to {dim // 2}")
        if not section.get("mrope_interleaved", False):
            raise ConfigError(
                "config.json: mrope_section without mrope_interleaved: only the interleaved form is supported"
            )
        sections = tuple(int(n) for n in sections)
    original = section.get("original_max_position_embeddings") or text.get("max_position_embeddings") or 0
    return Rope(
        dim=dim,
        theta=merged.number("rope_theta", 10000.0),
        kind=kind,
        factor=merged.number("factor", 1.0),
        low_freq_factor=merged.number("low_freq_factor", 1.0),
        high_freq_factor=merged.number("high_freq_factor", 4.0),
        original_context=int(original),
        beta_fast=merged.number("beta_fast", 32.0),
        beta_slow=merged.number("beta_slow", 1.0),
        truncate=merged.flag("truncate", True),
        attention_factor=section.get("attention_factor"),
        sections=sections,
    )


def parse_text(raw: Mapping[str, Any], *, head_dim: int | None = None) -> TextConfig:
    """The text model of a config.json. head_dim: the family's default; None: hidden_size / num_attention_heads.

    Raises ConfigError.
    """
    text = text_section(raw)
    read = Reader(text)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    layers = read.integer("num_hidden_layers")
    dim = read.integer("head_dim", head_dim or hidden // heads)
    activation = text.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act is {activation!r}; supported: 'silu'")
    kv_heads = read.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    if text.get("use_sliding_window") and text.get("sliding_window"):
        raise ConfigError("config.json: use_sliding_window is true; sliding-window attention is not supported")
    experts = read.integer("num_experts", 0, least=0)
    top_k = read.integer("num_experts_per_tok", 0, least=0)
    if experts and not 0 < top_k <= experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {top_k}; it must be between 1 and num_experts {experts}"
        )
    dense = set(text.get("mlp_only_layers") or ())
    sparse_step = read.integer("decoder_sparse_step", 1)
    return TextConfig(
        model_type=str(text.get("model_type", "")),
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        intermediate_size=read.integer("intermediate_size", 0, least=0),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        max_position_embeddings=read.integer("max_position_embeddings", 2048),
        tie_word_embeddings=Reader({**text, **raw}).flag("tie_word_embeddings", False),
        rope=parse_rope(text, dim),
        layer_types=_layer_types(text, layers),
        attention_bias=read.flag("attention_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=read.integer("moe_intermediate_size", 0, least=0),
        shared_expert_intermediate_size=read.integer("shared_expert_intermediate_size", 0, least=0),
        norm_topk_prob=read.flag("norm_topk_prob", False),
        sparse_layers=tuple(experts > 0 and i not in dense and (i + 1) % sparse_step == 0 for i in range(layers)),
        **{
            name: read.integer(name, 0, least=0)
            for name in (
                "linear_num_key_heads",
                "linear_num_value_heads",
                "linear_key_head_dim",
                "linear_value_head_dim",
                "linear_conv_kernel_dim",
            )
        },
    )


def _layer_types(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The mixer of each layer, as listed or from `full_attention_interval`. Raises ConfigError."""
    listed = text.get("layer_types")
    if listed is None:
        interval = text.get("full_attention_interval") or (4 if text.get("linear_num_value_heads") else 1)
        listed = [FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(layers)]
    if len(listed) < layers:
        raise ConfigError(f"config.json: layer_types lists {len(listed)} layers, num_hidden_layers is {layers}")
    for kind in listed:
        if kind not in (FULL_ATTENTION, LINEAR_ATTENTION):
            raise ConfigError(
                f"config.json: layer type {kind!r} is not supported; supported: full_attention, linear_attention"
            )
    return tuple(listed[:layers])
