"""Kimi-Linear: three layers of Kimi Delta Attention to one of latent attention without rotation, and biased experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from firstlight.models import deepseek_v3
from firstlight.models.config import ConfigError, Reader, text_section
from firstlight.models.deepseek_v3 import LatentConfig
from firstlight.nn.channel_delta_net import ChannelDeltaNet
from firstlight.nn.latent_attention import LatentAttention
from firstlight.nn.module import Build, Module


@dataclass(frozen=True, slots=True)
class KimiConfig(LatentConfig):
    """A latent config with the sizes of the linear layers, and which those are (counted from 0)."""

    linear_heads: int = 1
    linear_dim: int = 1
    kernel: int = 4
    linear_layers: frozenset[int] = frozenset()


class Model(deepseek_v3.Model):
    """KimiLinearForCausalLM."""

    config: KimiConfig
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "num_experts": (),
        "num_experts_per_tok": ("num_experts_per_token",),
        "n_group": ("num_expert_group",),
        "norm_topk_prob": ("moe_renormalize",),
        "max_position_embeddings": ("model_max_length",),
        "shared": ("num_shared_experts",),
    }

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> KimiConfig:
        """`linear_attn_config` lists layers from 1; which are linear is read from it, not computed."""
        raw = text_section(config).get("linear_attn_config")
        if not isinstance(raw, Mapping) or not raw.get("kda_layers"):
            raise ConfigError("config.json: linear_attn_config with kda_layers is missing; kimi_linear needs it")
        plain, read = super().parse(config), Reader(raw)
        return KimiConfig(
            **{field.name: getattr(plain, field.name) for field in fields(LatentConfig)},
            linear_heads=read.integer("num_heads"),
            linear_dim=read.integer("head_dim"),
            kernel=read.integer("short_conv_kernel_size", 4),
            linear_layers=frozenset(layer - 1 for layer in raw["kda_layers"]),
        )

    def mixer(self, build: Build, name: str, layer: int) -> Module:
        """Kimi Delta Attention, or latent attention."""
        text = self.config
        if layer not in text.linear_layers:
            return LatentAttention(build, f"{name}.self_attn", **self.attention_sizes(), rotates=False)
        return ChannelDeltaNet(
            build,
            f"{name}.self_attn",
            hidden=text.hidden_size,
            heads=text.linear_heads,
            dim=text.linear_dim,
            kernel=text.kernel,
            eps=text.rms_norm_eps,
        )

    def mlp(self, build: Build, name: str, layer: int) -> Module:
        """As in DeepSeek-V3, under other names: experts sit in `block_sparse_moe`, as w1 (gate), w3 (up) and w2 (down)."""
        module = super().mlp(build, name, layer)
        for attribute, spec in module.weight_specs.items():
            forms = tuple(tuple(replace(s, source=_published(s.source)) for s in form) for form in spec.forms)
            module.weight_specs[attribute] = replace(spec, forms=forms)
        return module


EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _published(source: str) -> str:
    """A weight's name in Kimi-Linear's checkpoints, from DeepSeek's."""
    if ".mlp." not in source or not any(part in source for part in (".experts.", ".shared_experts.", ".gate.")):
        return source
    source = source.replace(".mlp.", ".block_sparse_moe.")
    if ".experts.{expert}." in source:
        for theirs, ours in EXPERT_NAMES.items():
            source = source.replace(f".{theirs}.", f".{ours}.")
    return source
