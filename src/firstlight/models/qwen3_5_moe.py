"""Qwen3.5-MoE and 3.6-MoE: Qwen3.5 with routed experts and a gated shared expert in every layer.

Which layers are sparse, and how experts are stored (fused stacks in BF16, one tensor each in FP8), is handled where
Qwen3-Next's is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.models import qwen3_5
from firstlight.models.config import TextConfig


class Model(qwen3_5.Model):
    """Qwen3_5MoeForConditionalGeneration and Qwen3_5MoeForCausalLM."""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> TextConfig:
        """As Qwen3.5's, with experts."""
        text = super().parse(config)
        text.require("num_experts")
        return text
