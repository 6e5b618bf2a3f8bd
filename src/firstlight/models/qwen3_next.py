"""Qwen3-Next: three Gated DeltaNet layers to one gated attention layer, routed experts with a gated shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

from firstlight.models.causal import CausalModel
from firstlight.models.config import LINEAR_ATTENTION, ConfigError, TextConfig, parse_text, text_section
from firstlight.nn.attention import Attention
from firstlight.nn.gated_delta_net import GatedDeltaNet
from firstlight.nn.mlp import MLP, MoE
from firstlight.nn.module import Build, Module

FIXED = {"attn_output_gate": (True, None), "output_gate_type": ("swish", "silu", None)}
"""Fields that name a variant of which published models have one: attention with a gate, and SiLU in DeltaNet's."""


class Model(CausalModel):
    """Qwen3NextForCausalLM. Norm weights of the residual stream and of q and k are zero-centred."""

    zero_centred = True
    ignored = (*CausalModel.ignored, r"^mtp\.")
    interleaved: ClassVar[bool] = True  # q, k, v, z (and b, a) are stored interleaved per key head
    always_renormalise: ClassVar[bool] = False  # whatever norm_topk_prob says

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> TextConfig:
        """head_dim defaults to 256; a quarter of it rotates; every fourth layer is full attention."""
        text = parse_text(config, head_dim=256, defaults={"partial_rotary_factor": 0.25, "norm_topk_prob": True})
        for name, legal in FIXED.items():
            if text_section(config).get(name, legal[0]) not in legal:
                raise ConfigError(
                    f"config.json: {name} is {text_section(config)[name]!r}; supported: {', '.join(map(repr, legal))}"
                )
        if LINEAR_ATTENTION in text.layer_types:
            text.require(*(field.name for field in fields(text) if field.name.startswith("linear_")))
        if any(text.sparse_layers):
            text.require("moe_intermediate_size", "shared_expert_intermediate_size")
        if not all(text.sparse_layers):
            text.require("intermediate_size")
        return replace(text, norm_topk_prob=True) if cls.always_renormalise else text

    def mixer(self, build: Build, name: str, layer: int) -> Module:
        """Gated DeltaNet, or attention with an output gate."""
        text = self.config
        if text.layer_types[layer] == LINEAR_ATTENTION:
            return GatedDeltaNet(
                build,
                f"{name}.linear_attn",
                hidden=text.hidden_size,
                key_heads=text.linear_num_key_heads,
                value_heads=text.linear_num_value_heads,
                key_dim=text.linear_key_head_dim,
                value_dim=text.linear_value_head_dim,
                kernel=text.linear_conv_kernel_dim,
                eps=text.rms_norm_eps,
                interleaved=self.interleaved,
            )
        return Attention(
            build,
            f"{name}.self_attn",
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            eps=text.rms_norm_eps,
            gated=True,
            head_norm=True,
            zero_centred=True,
            bias=text.attention_bias,
        )

    def mlp(self, build: Build, name: str, layer: int) -> Module:
        """Experts in sparse layers, SwiGLU in dense ones."""
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
            shared=text.shared_expert_intermediate_size,
            renormalise=text.norm_topk_prob,
        )
