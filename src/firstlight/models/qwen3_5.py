"""Qwen3.5 and 3.6: Qwen3-Next's layers with projections stored apart, interleaved MRoPE, and a vision tower.

Published checkpoints are `Qwen3_5ForConditionalGeneration`: the text model sits under `model.language_model`, the tower
under `model.visual`. Text-only checkpoints (`Qwen3_5ForCausalLM`) have neither prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.models import qwen3_next
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
        self.visual = None if vision is None else VisionTower(build, "model.visual", vision)
