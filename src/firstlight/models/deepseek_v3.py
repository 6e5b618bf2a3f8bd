"""DeepSeek-V3 and R1, and Kimi-K2: latent attention, and experts chosen by biased sigmoid scores among groups.

The first `first_k_dense_replace` layers have a dense MLP. The multi-token-prediction layer is a draft and not built here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from firstlight.models.causal import CausalModel
from firstlight.models.config import Reader, TextConfig, parse_text, text_section
from firstlight.nn.biased_moe import BiasedMoE
from firstlight.nn.latent_attention import LatentAttention
from firstlight.nn.mlp import MLP
from firstlight.nn.module import Build, Module


@dataclass(frozen=True, slots=True)
class LatentConfig(TextConfig):
    """A text config with the sizes of latent attention and of biased routing."""

    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    score_scale: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0


class Model(CausalModel):
    """DeepseekV3ForCausalLM."""

    config: LatentConfig
    ignored = (*CausalModel.ignored, r"^model\.layers\.\d+\.(enorm|hnorm|eh_proj|shared_head|embed_tokens)\.")
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "num_experts": ("n_routed_experts", "num_routed_experts"),
        "shared": ("n_shared_experts", "num_shared_experts"),
    }

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> LatentConfig:
        """The rotary dimensions stand in for a head's; experts have names of their own."""
        text = text_section(config)
        read = Reader(text)
        for ours, theirs in cls.spellings.items():
            text[ours] = next((text[name] for name in (ours, *theirs) if text.get(name) is not None), 0)
        turned = read.integer("qk_rope_head_dim")
        plain = parse_text({**config, **text, "head_dim": turned}, head_dim=turned)
        dense = read.integer("first_k_dense_replace", 0, least=0)
        nope = read.integer("qk_nope_head_dim")
        rope, score_scale = plain.rope, (nope + turned) ** -0.5
        if rope.kind == "yarn":
            scaling = Reader({**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})})
            of_all = _magnitude(rope.factor, scaling.number("mscale_all_dim", 1e-30))
            rope = replace(rope, attention_factor=_magnitude(rope.factor, scaling.number("mscale", 1.0)) / of_all)
            score_scale *= of_all**2
        values = {field.name: getattr(plain, field.name) for field in fields(TextConfig)}
        values.update(
            rope=rope,
            sparse_layers=tuple(plain.num_experts > 0 and i >= dense for i in range(plain.num_hidden_layers)),
            shared_expert_intermediate_size=int(text["shared"]) * plain.moe_intermediate_size,
            norm_topk_prob=read.flag("norm_topk_prob", True),
        )
        return LatentConfig(
            **values,
            q_lora_rank=read.integer("q_lora_rank", 0, least=0),
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=turned,
            v_head_dim=read.integer("v_head_dim"),
            score_scale=score_scale,
            n_group=read.integer("n_group", 1),
            topk_group=read.integer("topk_group", 1),
            routed_scaling_factor=read.number("routed_scaling_factor", 1.0),
        )

    def mixer(self, build: Build, name: str, layer: int) -> Module:
        """Latent attention."""
        return LatentAttention(build, f"{name}.self_attn", **self.attention_sizes())

    def attention_sizes(self) -> dict[str, Any]:
        """Arguments of `LatentAttention`."""
        text = self.config
        return {
            "hidden": text.hidden_size,
            "heads": text.num_attention_heads,
            "q_rank": text.q_lora_rank,
            "kv_rank": text.kv_lora_rank,
            "nope": text.qk_nope_head_dim,
            "turned": text.qk_rope_head_dim,
            "value_dim": text.v_head_dim,
            "scale": text.score_scale,
        }

    def mlp(self, build: Build, name: str, layer: int) -> Module:
        """Experts, but in the first layers."""
        text = self.config
        if not text.sparse_layers[layer]:
            return MLP(build, f"{name}.mlp", text.hidden_size, text.intermediate_size)
        return BiasedMoE(
            build,
            f"{name}.mlp",
            hidden=text.hidden_size,
            experts=text.num_experts,
            top_k=text.num_experts_per_tok,
            intermediate=text.moe_intermediate_size,
            shared=text.shared_expert_intermediate_size,
            renormalise=text.norm_topk_prob,
            groups=text.n_group,
            top_groups=text.topk_group,
            scale=text.routed_scaling_factor,
        )


def _magnitude(factor: float, mscale: float) -> float:
    """YaRN's growth of the scores with the stretch of the context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
