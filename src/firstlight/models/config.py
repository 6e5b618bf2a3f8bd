"""A checkpoint's config.json as typed data: every published spelling, read once.

Text fields may be nested under `text_config`; rotary settings come as `rope_parameters` (transformers 5) or as
`rope_theta` + `rope_scaling` (4 and earlier). A missing or impossible value is an error that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.errors import InputError
from firstlight.nn.rope import Rope

FULL_ATTENTION, LINEAR_ATTENTION = "full_attention", "linear_attention"
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
LARGEST_SIZE, MOST_LAYERS, MOST_HEADS = 2**31 - 1, 4096, 65536
"""A config.json is untrusted: what is beyond these is refused before anything is built."""


class ConfigError(InputError):
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

    def require(self, *names: str) -> None:
        """Sizes that are optional elsewhere, but not here. Raises ConfigError, naming the first that is 0 or missing."""
        for name in names:
            if not getattr(self, name):
                raise ConfigError(f"config.json: {name} is missing (or 0); models of type {self.model_type!r} need it")


class Reader:
    """Reads fields of a config, with errors that say what is wrong."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """A whole number from `least` to `most`. Raises ConfigError."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"config.json: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"config.json: {name} is {value!r}; it must be a whole number of at least {least}")
        if value > most:
            raise ConfigError(f"config.json: {name} is {value!r}; it must be at most {most}")
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

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty if it isn't there. Raises ConfigError."""
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or any(type(item) is not int for item in value):
            raise ConfigError(f"config.json: {name} is {value!r}; it must be a list of whole numbers")
        return tuple(value)

    def section(self, name: str) -> dict[str, Any]:
        """An object without its nulls; empty if it isn't there. Raises ConfigError."""
        return _stated(self._object(name))

    def _object(self, name: str) -> Mapping[str, Any]:
        value = self.raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {name} is {value!r}; it must be an object")
        return value


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, which say no more than a field that isn't there."""
    return {key: value for key, value in values.items() if value is not None}


def text_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model, wherever they are: nested ones win over the outer ones."""
    nested = raw.get("text_config")
    if nested is None:
        return dict(raw)
    if not isinstance(nested, Mapping):
        raise ConfigError(f"config.json: text_config is {type(nested).__name__}; it must be an object")
    outer = {key: value for key, value in raw.items() if key not in ("text_config", "vision_config")}
    return {**outer, **nested}


def own_dtype(raw: Mapping[str, Any]) -> str | None:
    """The name of the dtype that a checkpoint's activations have, as config.json gives it; None if it doesn't. Whoever asks
    says which names it takes."""
    text = text_section(raw)
    own = text.get("dtype") or text.get("torch_dtype")
    return None if own is None else str(own).removeprefix("torch.")


def parse_rope(text: Mapping[str, Any], head_dim: int) -> Rope:
    """Rotary settings in either spelling. Raises ConfigError for a kind that isn't known."""
    section = Reader(text).section("rope_scaling") | Reader(text).section("rope_parameters")
    if FULL_ATTENTION in section:  # one setting a layer type; ours have rotary embeddings in full attention only
        section = Reader(section).section(FULL_ATTENTION)
    merged = Reader({**{key: text[key] for key in ("rope_theta", "partial_rotary_factor") if key in text}, **section})
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "mrope":
        kind = "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    share = merged.number("partial_rotary_factor", 1.0)
    dim = int(head_dim * share) if share <= 1 else 0
    if dim < 2 or dim % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor is {share}; of head_dim {head_dim} it must leave an even number to rotate"
        )
    sections = merged.integers("mrope_section") or None
    if sections is not None:
        if len(sections) != 3 or sum(sections) != dim // 2:
            raise ConfigError(
                f"config.json: mrope_section {list(sections)} must be three numbers that sum to {dim // 2}"
            )
        if not section.get("mrope_interleaved", False):
            raise ConfigError(
                "config.json: mrope_section without mrope_interleaved: only the interleaved form is supported"
            )
    original = section.get("original_max_position_embeddings", text.get("max_position_embeddings", 2048))
    return Rope(
        dim=dim,
        theta=merged.number("rope_theta", 10000.0),
        kind=kind,
        factor=merged.number("factor", 1.0 if kind == "default" else None),
        low_freq_factor=merged.number("low_freq_factor", 1.0),
        high_freq_factor=merged.number("high_freq_factor", 4.0),
        original_context=Reader({"original_max_position_embeddings": original}).integer(
            "original_max_position_embeddings"
        ),
        beta_fast=merged.number("beta_fast", 32.0),
        beta_slow=merged.number("beta_slow", 1.0),
        truncate=merged.flag("truncate", True),
        attention_factor=_attention_factor(merged),
        sections=sections,
    )


def _attention_factor(section: Reader) -> float | None:
    """YaRN's, as stated or from `mscale` and `mscale_all_dim`; None: the paper's."""
    if section.raw.get("attention_factor") is not None:
        return section.number("attention_factor")
    if not (section.raw.get("mscale") and section.raw.get("mscale_all_dim")):
        return None
    growth = 0.1 * math.log(max(section.number("factor", 1.0), 1.0))
    return (growth * section.number("mscale") + 1) / (growth * section.number("mscale_all_dim") + 1)


def parse_text(
    raw: Mapping[str, Any],
    *,
    head_dim: int | None = None,
    defaults: Mapping[str, Any] | None = None,
    layer_kinds: Sequence[str] = (FULL_ATTENTION, LINEAR_ATTENTION),
) -> TextConfig:
    """The text model of a config.json.

    head_dim: the family's default; None: hidden_size / num_attention_heads. defaults: what the family takes for other
    fields that aren't there. layer_kinds: the mixers that it has. Raises ConfigError.
    """
    text = {**(defaults or {}), **_stated(text_section(raw))}
    read = Reader(text)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    layers = read.integer("num_hidden_layers", most=MOST_LAYERS)
    dim = read.integer("head_dim", head_dim or hidden // heads)
    activation = text.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act is {activation!r}; supported: 'silu'")
    kv_heads = read.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    if read.flag("rope_interleaved", False):
        raise ConfigError("config.json: rope_interleaved is true; only rotary embeddings by halves are supported")
    if text.get("use_sliding_window") and text.get("sliding_window"):
        raise ConfigError("config.json: use_sliding_window is true; sliding-window attention is not supported")
    experts = read.integer("num_experts", 0, least=0, most=MOST_LAYERS)
    top_k = read.integer("num_experts_per_tok", 0, least=0)
    if experts and not 0 < top_k <= experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {top_k}; it must be between 1 and num_experts {experts}"
        )
    dense = set(read.integers("mlp_only_layers"))
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
        tie_word_embeddings=Reader({**text, **_stated(raw)}).flag("tie_word_embeddings", False),
        rope=parse_rope(text, dim),
        layer_types=_layer_types(text, layers, layer_kinds),
        attention_bias=read.flag("attention_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=read.integer("moe_intermediate_size", 0, least=0),
        shared_expert_intermediate_size=read.integer("shared_expert_intermediate_size", 0, least=0),
        norm_topk_prob=read.flag("norm_topk_prob", False),
        sparse_layers=tuple(experts > 0 and i not in dense and (i + 1) % sparse_step == 0 for i in range(layers)),
        **{
            name: read.integer(name, 0, least=0, most=MOST_HEADS)
            for name in (
                "linear_num_key_heads",
                "linear_num_value_heads",
                "linear_key_head_dim",
                "linear_value_head_dim",
                "linear_conv_kernel_dim",
            )
        },
    )


def _layer_types(text: Mapping[str, Any], layers: int, kinds: Sequence[str]) -> tuple[str, ...]:
    """The mixer of each layer, as listed or from `full_attention_interval`. Raises ConfigError."""
    listed = text.get("layer_types")
    if listed is None:
        interval = Reader(text).integer("full_attention_interval", 4 if text.get("linear_num_value_heads") else 1)
        listed = [FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(layers)]
    if not isinstance(listed, list | tuple):
        raise ConfigError(f"config.json: layer_types is {listed!r}; it must be a list")
    if len(listed) < layers:
        raise ConfigError(f"config.json: layer_types lists {len(listed)} layers, num_hidden_layers is {layers}")
    for kind in listed:
        if kind not in kinds:
            raise ConfigError(f"config.json: layer type {kind!r} is not supported; supported: {', '.join(kinds)}")
    return tuple(listed[:layers])
