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
from firstlight.quant.format import Format, plain

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
    """`quant_method: fp8` with `weight_block_size`: float8_e4m3fn payload, one scale a block; value = element * scale.

    skip: modules that stay in high precision, by name or by any whole part of it ("lm_head", "mlp.gate"). stored: dtypes of
    the checkpoint's tensors by name, or None where there is no checkpoint, or none to ask yet. scale_dtype: of the scales then.
    """

    block: tuple[int, int] = (128, 128)
    skip: tuple[str, ...] = ()
    stored: Mapping[str, torch.dtype] | None = None
    scale_dtype: torch.dtype = torch.bfloat16

    def format(self, name: str) -> Format:
        """Format of the weight with this checkpoint name; `{expert}` in it stands for any expert."""
        probe = name.replace("{expert}", "0")
        if self.stored is not None:
            scale = self.stored.get(probe + SCALE_SUFFIX)
            return plain(self.dtype) if scale is None else self._scaled(scale)
        if HIGH_PRECISION.search(probe) or any(f".{skip}." in f".{probe}." for skip in self.skip):
            return plain(self.dtype)
        return self._scaled(self.scale_dtype)

    def _scaled(self, scale: torch.dtype) -> Format:
        return Format("float8_e4m3fn", self.block, str(scale).removeprefix("torch."))


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
    quantization = config.get("quantization_config")
    if not quantization and isinstance(nested, Mapping):
        quantization = nested.get("quantization_config")
    if not quantization:
        return Scheme(dtype)
    if not isinstance(quantization, Mapping):
        raise InputError(f"config.json: quantization_config is {quantization!r}; it must be an object")
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, list | tuple) and [type(n) for n in block] == [int, int]):
        raise InputError(
            f"quantization_config: quant_method {method!r} with weight_block_size {block!r} is not supported; "
            "supported: quant_method 'fp8' with weight_block_size [rows, columns], no quantization, or a GGUF file"
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
    skip = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ()
    if not isinstance(skip, list | tuple) or not all(isinstance(name, str) for name in skip):
        raise InputError("quantization_config: modules_to_not_convert must be a list of names")
    skip = tuple(name.replace("language_model.", "") for name in skip)  # as the families rename tensors
    return BlockFp8(dtype, (int(block[0]), int(block[1])), skip, stored)
