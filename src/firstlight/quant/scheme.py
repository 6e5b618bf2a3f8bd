"""Which format each weight has, as the checkpoint declares it.

A scheme answers for one weight of a linear (or expert, or embedding) by its checkpoint name. Where the stored tensors are
known they decide (a block-scaled weight has a scale beside it); for random weights and predictions the config's rules do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from firstlight.errors import InputError
from firstlight.quant.format import WHOLE_ROW, Format, dtype_name, plain
from firstlight.quant.patterns import matcher

SCALE_SUFFIX = "_scale_inv"

# Linear layers that published FP8 checkpoints of these families keep in high precision, where the list isn't in the config.
HIGH_PRECISION = re.compile(
    r"(^|\.)(lm_head|embed_tokens|in_proj_a|in_proj_b|in_proj_ba|shared_expert_gate|mlp\.gate|visual)(\.|$)|patch_embed|pos_embed"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """All weights plain, in the activations' dtype."""

    dtype: torch.dtype

    def format(self, name: str) -> Format:
        """Format of the weight with this checkpoint name."""
        return plain(self.dtype)


@dataclass(frozen=True, slots=True)
class BlockFp8(Scheme):
    """float8_e4m3fn payload, one scale a block; value = element * scale. `quant_method: fp8` with `weight_block_size`, or
    `compressed-tensors` with a scale for each channel, which is a row (block (1, `WHOLE_ROW`)).

    skip: modules that stay in high precision, by name or by any whole part of it ("lm_head", "mlp.gate"); patterns: the same, as
    regular expressions for published names, which begin with `published` where ours begin with "model.". stored: dtypes of
    the checkpoint's tensors by name, or None where there is no checkpoint, or none to ask yet. scale_dtype: of the scales then.
    """

    block: tuple[int, int] = (128, 128)
    skip: tuple[str, ...] = ()
    stored: Mapping[str, torch.dtype] | None = None
    scale_dtype: torch.dtype = torch.bfloat16
    patterns: tuple[str, ...] = ()
    published: str = "model."

    def format(self, name: str) -> Format:
        """Format of the weight with this checkpoint name; `{expert}` in it stands for any expert."""
        probe = name.replace("{expert}", "0")
        if self.stored is not None:
            scale = self.stored.get(probe + SCALE_SUFFIX)
            return plain(self.dtype) if scale is None else self._scaled(scale)
        if HIGH_PRECISION.search(probe) or any(f".{skip}." in f".{probe}." for skip in self.skip):
            return plain(self.dtype)
        module = probe.removesuffix(".weight")
        if module.startswith("model."):
            module = self.published + module.removeprefix("model.")
        return plain(self.dtype) if matcher(self.patterns)(module) else self._scaled(self.scale_dtype)

    def _scaled(self, scale: torch.dtype) -> Format:
        return Format("float8_e4m3fn", self.block, dtype_name(scale))


@dataclass(frozen=True, slots=True)
class GgufBlocks(Scheme):
    """GGUF: every tensor names its own type; weights stay in their blocks."""

    types: Mapping[str, str] = field(default_factory=dict)

    def format(self, name: str) -> Format:
        """Format of the weight with this checkpoint name; plain float types become the activations' dtype."""
        kind = self.types.get(name.replace("{expert}", "0"), "F32")
        return plain(self.dtype) if kind in ("F32", "F16", "BF16") else Format(kind)


def scheme_of(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    stored: Mapping[str, torch.dtype] | None = None,
    ggml_types: Mapping[str, str] | None = None,
) -> Scheme:
    """The scheme of a checkpoint, from the `quantization_config` of its config.json, or from a GGUF's tensor types.

    Raises ValueError for a method that isn't known.
    """
    if ggml_types is not None:
        return GgufBlocks(dtype, ggml_types)
    nested = config.get("text_config")
    quantization = config.get("quantization_config") or config.get("compression_config")  # compressed-tensors' of 2024
    if not quantization and isinstance(nested, Mapping):
        quantization = nested.get("quantization_config")
    if not quantization:
        return Scheme(dtype)
    if not isinstance(quantization, Mapping):
        raise InputError(f"config.json: quantization_config is {quantization!r}; it must be an object")
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        published = "model.language_model." if isinstance(nested, Mapping) else "model."
        return _channel_fp8(quantization, dtype, stored, published)
    block = quantization.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, list | tuple) and [type(n) for n in block] == [int, int]):
        raise InputError(
            f"quantization_config: quant_method {method!r} with weight_block_size {block!r} is not supported; "
            "supported: quant_method 'fp8' with weight_block_size [rows, columns], 'compressed-tensors' with FP8 weights "
            "by channel, no quantization, or a GGUF file"
        )
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise InputError(f"quantization_config: fmt {quantization['fmt']!r} is not supported; supported: 'e4m3'")
    if min(block) < 1:
        raise InputError(f"quantization_config: weight_block_size is {block!r}; both must be at least 1")
    if quantization.get("activation_scheme", "dynamic") not in ("dynamic", None):
        raise InputError(
            f"quantization_config: activation_scheme {quantization['activation_scheme']!r} is not supported; "
            "supported: 'dynamic'"
        )
    skip = _names(quantization, "modules_to_not_convert") or _names(quantization, "ignored_layers")
    return BlockFp8(dtype, (int(block[0]), int(block[1])), skip, stored)


def _names(quantization: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of modules' names, as the families rename tensors; regular expressions ("re:...") as they are."""
    names = quantization.get(key) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"quantization_config: {key} must be a list of names")
    return tuple(name if name.startswith("re:") else name.replace("language_model.", "") for name in names)


CHANNEL_WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "channel", "dynamic": False, "symmetric": True}
TOKEN_ACTIVATIONS = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
"""Of a group in `config_groups`: FP8 with a scale for each row of a weight, and one for each token, found as it comes."""
DEFAULTS = {"type": "int", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
"""What compressed-tensors takes for a field that isn't there."""
FLOAT8_FORMATS = (None, "float-quantized", "naive-quantized")
"""Of compressed-tensors' `format`, those that store FP8 an element a byte, as it is."""


def _channel_fp8(
    quantization: Mapping[str, Any], dtype: torch.dtype, stored: Mapping[str, torch.dtype] | None, published: str
) -> Scheme:
    """compressed-tensors' FP8 by channel and token (published as "FP8-dynamic"). Raises InputError for its other schemes."""
    groups = quantization.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else groups
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], Mapping):
        raise InputError(f"quantization_config: config_groups is {groups!r}; exactly one group is supported")
    group = groups[0]
    for part, wanted in (("weights", CHANNEL_WEIGHTS), ("input_activations", TOKEN_ACTIVATIONS)):
        given = group.get(part)
        if not isinstance(given, Mapping) or any(given.get(key, DEFAULTS[key]) != wanted[key] for key in wanted):
            raise InputError(
                f"quantization_config: config_groups has {part} {given!r}; of compressed-tensors, {wanted} is supported"
            )
    if group.get("targets", ["Linear"]) != ["Linear"]:
        raise InputError(f"quantization_config: targets {group['targets']!r} are not supported; supported: ['Linear']")
    for fields in (quantization, group):
        if fields.get("format") not in FLOAT8_FORMATS:
            raise InputError(
                f"quantization_config: format {fields['format']!r} is not supported; supported: 'float-quantized', 'naive-quantized'"
            )
    _refuse_more(quantization, group)
    ignored = _names(quantization, "ignore")
    patterns = tuple(name.removeprefix("re:") for name in ignored if name.startswith("re:"))
    if stored is None:
        matcher(patterns)  # refuses what it can't match
    skip = tuple(name for name in ignored if not name.startswith("re:"))
    return BlockFp8(dtype, (1, WHOLE_ROW), skip, stored, patterns=patterns, published=published)


def _refuse_more(quantization: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """What compressed-tensors may do beside quantising weights and inputs, none of which we do. Raises InputError."""
    sparsity = quantization.get("sparsity_config")
    more = {
        "kv_cache_scheme": quantization.get("kv_cache_scheme"),
        "output_activations": group.get("output_activations"),
        "transform_config": quantization.get("transform_config") or None,
        "sparsity_config": None
        if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"
        else sparsity,
    }
    for name, value in more.items():
        if value is not None:
            raise InputError(f"quantization_config: {name} is {value!r}, which is not supported; it must be null")
