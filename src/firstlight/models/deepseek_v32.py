"""DeepSeek-V3.2: V3 with sparse attention, whose keys a small indexer chooses for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from firstlight.models import deepseek_v3
from firstlight.models.config import Reader, text_section
from firstlight.models.deepseek_v3 import LatentConfig
from firstlight.nn.module import Build, Module
from firstlight.nn.sparse_latent_attention import SparseLatentAttention


@dataclass(frozen=True, slots=True)
class SparseConfig(LatentConfig):
    """V3's config with the indexer's sizes."""

    index_n_heads: int = 1
    index_head_dim: int = 1
    index_topk: int = 1


class Model(deepseek_v3.Model):
    """DeepseekV32ForCausalLM."""

    config: SparseConfig

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> SparseConfig:
        """V3's fields and three of the indexer."""
        plain = super().parse(config)
        read = Reader(text_section(config))
        return SparseConfig(
            **{field.name: getattr(plain, field.name) for field in fields(LatentConfig)},
            index_n_heads=read.integer("index_n_heads"),
            index_head_dim=read.integer("index_head_dim"),
            index_topk=read.integer("index_topk"),
        )

    def mixer(self, build: Build, name: str, layer: int) -> Module:
        """Sparse latent attention."""
        text = self.config
        return SparseLatentAttention(
            build,
            f"{name}.self_attn",
            index_heads=text.index_n_heads,
            index_dim=text.index_head_dim,
            index_top=text.index_topk,
            **self.attention_sizes(),
        )
