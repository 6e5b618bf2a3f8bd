"""Qwen3-MoE: Qwen3's attention, and routed experts in place of the MLP (no shared expert)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.models import qwen3
from firstlight.models.config import FULL_ATTENTION, TextConfig, parse_text, text_section
from firstlight.nn.mlp import MLP, MoE
from firstlight.nn.module import Build, Module


class Model(qwen3.Model):
    """Qwen3MoeForCausalLM."""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> TextConfig:
        """Unlike Qwen3's, head_dim defaults to hidden_size / num_attention_heads.

        transformers 5 writes num_experts as num_local_experts when it saves a config.
        """
        section = text_section(config)
        if section.get("num_experts") is None and section.get("num_local_experts") is not None:
            config = {**config, **section, "num_experts": section["num_local_experts"]}
        text = parse_text(config, layer_kinds=(FULL_ATTENTION,))
        text.require("num_experts", "moe_intermediate_size")
        if not all(text.sparse_layers):
            text.require("intermediate_size")
        return text

    def mlp(self, build: Build, name: str, layer: int) -> Module:
        """Softmax over all experts, top k, renormalised where `norm_topk_prob` says so; some layers may be dense."""
        text = self.config
        if not text.sparse_layers[layer]:
            return MLP(build, f"{name}.mlp", text.hidden_size, text.intermediate_size)
        return MoE(
            build,
            f"{name}.mlp",
            hidden=text.hidden_size,
            experts=text.num_experts,
            top_k=text.num_experts_per_tok,
            intermediate=text.moe_intermediate_size,
            renormalise=text.norm_topk_prob,
        )
