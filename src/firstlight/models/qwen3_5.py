"""Qwen3.5 and 3.6: Qwen3-Next's layers with projections stored apart, interleaved MRoPE, and a vision tower.

Published checkpoints are `Qwen3_5ForConditionalGeneration`: the text model sits under `model.language_model`, the tower
under `model.visual`. Text-only checkpoints (`Qwen3_5ForCausalLM`) have neither prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from firstlight.models import qwen3_next
from firstlight.models.config import ConfigError
from firstlight.nn.module import Build
from firstlight.nn.vision import VisionTower


class Model(qwen3_next.Model):
    """Qwen3_5ForConditionalGeneration and Qwen3_5ForCausalLM."""

    interleaved = False
    always_renormalise = True
    renames = (("model.language_model.", "model."),)

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        vision = config.get("vision_config")
        self.visual = None if vision is None else self._tower(vision, build)

    def _tower(self, vision: Mapping[str, Any], build: Build) -> VisionTower:
        try:
            tower = VisionTower(build, "model.visual", vision)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        size, hidden = tower.config.out_hidden_size, self.config.hidden_size
        if size != hidden:
            raise ConfigError(f"config.json: vision_config.out_hidden_size is {size}; it must be hidden_size {hidden}")
        return tower

    def encode_shapes(self, bucket: int) -> None:
        """The tower on one image of 32 x 32 patches."""
        if self.visual is not None:
            patches = torch.empty((32 * 32, self.visual.config.patch_values), dtype=self.visual.dtype, device="meta")
            self.visual(patches, [(1, 32, 32)], bucket)
