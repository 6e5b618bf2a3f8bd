"""Sizes of a vision tower as config.json states them, and sizes of the images that it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Grid = tuple[int, int, int]
"""An image or a video: frames, rows, columns; rows and columns in patches."""

ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}
"""`hidden_act` -> how GELU is approximated."""

MOST_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of a tower; fields are named as in config.json's `vision_config`.

    grid_side: the learned position embeddings form a square of this side. rope_theta: base of the rotary frequencies.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    grid_side: int
    hidden_act: str
    rope_theta: float

    @property
    def patch_values(self) -> int:
        """Numbers in a patch, ordered channel, frame, row, column."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_heads

    @property
    def merged(self) -> int:
        """Patches that become one embedding."""
        return self.spatial_merge_size**2

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> VisionConfig:
        """raw: the `vision_config` of a config.json. Raises ValueError, naming the field, its value and what is legal."""
        if not isinstance(raw, Mapping):
            raise ValueError(f"config.json: vision_config is {type(raw).__name__}; it must be an object")
        hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_heads")
        if hidden % (4 * heads):
            raise ValueError(
                f"config.json: vision_config.hidden_size is {hidden}; it must be a multiple of 4 x num_heads = {4 * heads}"
            )
        positions = _integer(raw, "num_position_embeddings")
        if math.isqrt(positions) ** 2 != positions:
            raise ValueError(
                f"config.json: vision_config.num_position_embeddings is {positions}; it must be the square of a whole number"
            )
        activation = raw.get("hidden_act", "gelu_pytorch_tanh")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(
                f"config.json: vision_config.hidden_act is {activation!r}; supported: {', '.join(sorted(ACTIVATIONS))}"
            )
        if raw.get("deepstack_visual_indexes"):
            raise ValueError(
                f"config.json: vision_config.deepstack_visual_indexes is {raw['deepstack_visual_indexes']!r}; "
                "only towers without deepstack layers ([]) are supported"
            )
        return cls(
            depth=_integer(raw, "depth", most=MOST_BLOCKS),
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_heads=heads,
            out_hidden_size=_integer(raw, "out_hidden_size"),
            in_channels=_integer(raw, "in_channels", 3),
            patch_size=_integer(raw, "patch_size", 16),
            temporal_patch_size=_integer(raw, "temporal_patch_size", 2),
            spatial_merge_size=_integer(raw, "spatial_merge_size", 2),
            grid_side=math.isqrt(positions),
            hidden_act=activation,
            rope_theta=_rope_theta(raw),
        )


def _integer(raw: Mapping[str, Any], field: str, default: int | None = None, most: int = 2**24) -> int:
    value = raw.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "missing" if value is None else repr(value)
        raise ValueError(f"config.json: vision_config.{field} is {found}; it must be a whole number of at least 1")
    if value > most:  # a config.json is untrusted
        raise ValueError(f"config.json: vision_config.{field} is {value}; it must be at most {most}")
    return value


def _rope_theta(raw: Mapping[str, Any]) -> float:
    section = raw.get("rope_parameters") or {}
    if not isinstance(section, Mapping) or section.get("rope_type", "axial") != "axial":
        raise ValueError(f"config.json: vision_config.rope_parameters is {section!r}; supported: rope_type 'axial'")
    theta = section.get("rope_theta", 10000.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ValueError(
            f"config.json: vision_config.rope_parameters.rope_theta is {theta!r}; it must be a number above 0"
        )
    return float(theta)


def merged_grid(grid: Grid, merge: int) -> Grid:
    """The grid after each merge x merge block of patches has become one. Raises ValueError if it doesn't divide so."""
    frames, rows, columns = grid
    if min(grid) < 1 or rows % merge or columns % merge:
        raise ValueError(
            f"an image has the grid {tuple(grid)}; it must be (frames, rows, columns), each at least 1, "
            f"rows and columns multiples of {merge}"
        )
    return frames, rows // merge, columns // merge
