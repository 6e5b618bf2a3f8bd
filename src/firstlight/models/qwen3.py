"""Qwen3, dense: Llama with a plain RMSNorm on each head's q and k, and a head size of its own (128 unless stated)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.models.causal import CausalModel
from firstlight.models.config import FULL_ATTENTION, TextConfig, parse_text
from firstlight.nn.attention import Attention
from firstlight.nn.mlp import MLP
from firstlight.nn.module import Build, Module


class Model(CausalModel):
    """Qwen3ForCausalLM."""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> TextConfig:
        """head_dim defaults to 128, whatever the hidden size."""
        text = parse_text(config, head_dim=128, layer_kinds=(FULL_ATTENTION,))
        text.require("intermediate_size")
        return text

    def mixer(self, build: Build, name: str, layer: int) -> Module:
        """Grouped-query attention with q/k norm."""
        text = self.config
        return Attention(
            build,
            f"{name}.self_attn",
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            eps=text.rms_norm_eps,
            head_norm=True,
            bias=text.attention_bias,
        )

    def mlp(self, build: Build, name: str, layer: int) -> Module:
        """SwiGLU."""
        return MLP(build, f"{name}.mlp", self.config.hidden_size, self.config.intermediate_size)
