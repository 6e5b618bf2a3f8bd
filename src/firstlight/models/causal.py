"""A decoder-only model: embed -> blocks -> head over a carry. Families are wirings of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from firstlight.models.config import TextConfig
from firstlight.nn.embedding import Embedding, Head
from firstlight.nn.module import Build, Carry, Module
from firstlight.nn.norm import AddNorm
from firstlight.nn.rope import RotaryAngles
from firstlight.step import StepBatch


class DecoderLayer(Module):
    """x += mixer(norm(x)); x += mlp(norm(x)). Each sum is taken by the norm that follows it."""

    def __init__(
        self, build: Build, name: str, config: TextConfig, mixer: Module, mlp: Module, zero_centred: bool
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = AddNorm(build, f"{name}.input_layernorm", size, eps, zero_centred, mixer.reads())
        self.mixer = mixer
        self.post_attention_layernorm = AddNorm(
            build, f"{name}.post_attention_layernorm", size, eps, zero_centred, mlp.reads()
        )
        self.mlp = mlp

    def forward(self, step: StepBatch, carry: Carry) -> None:
        """Advance the carry by one layer."""
        x, residual = self.input_layernorm(step, carry.hidden, carry.residual)
        hidden = self.mixer(step, x, carry.angles)
        x, carry.residual = self.post_attention_layernorm(step, hidden, residual)
        carry.hidden = self.mlp(step, x)


class CausalModel(Module):
    """Token ids to logits.

    A family sets `zero_centred` and the tables of names, and builds the mixer and the MLP of each layer.
    `renames`: (published prefix, our prefix) pairs, tried in order, the first that fits is applied. `ignored`: patterns of
    checkpoint tensors that this model doesn't use.
    """

    zero_centred: ClassVar[bool] = False
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = (r"\.rotary_emb\.inv_freq$",)

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        """config: a config.json. Raises ConfigError, or ValueError where the mesh can't split it."""
        super().__init__()
        self.config = text = self.parse(config)
        self.embed_tokens = Embedding(build, "model.embed_tokens", text.vocab_size, text.hidden_size)
        self.rotary = RotaryAngles(build, text.rope)
        self.layers = torch.nn.ModuleList()
        for i in range(text.num_hidden_layers):
            name = f"model.layers.{i}"
            mixer, mlp = self.mixer(build, name, i), self.mlp(build, name, i)
            self.layers.append(DecoderLayer(build, name, text, mixer, mlp, self.zero_centred))
        self.norm = AddNorm(build, "model.norm", text.hidden_size, text.rms_norm_eps, self.zero_centred)
        tied = self.embed_tokens if text.tie_word_embeddings else None
        self.lm_head = Head(build, "lm_head", text.vocab_size, text.hidden_size, tied)

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> TextConfig:
        """The family's view of a config.json."""
        raise NotImplementedError

    def mixer(self, build: Build, name: str, layer: int) -> Module:
        """The token mixer of a layer."""
        raise NotImplementedError

    def mlp(self, build: Build, name: str, layer: int) -> Module:
        """The feed-forward part of a layer."""
        raise NotImplementedError

    @property
    def position_rows(self) -> int:
        """Rows of `StepBatch.positions`: 3 with MRoPE, else 1."""
        return 3 if self.config.rope.sections else 1

    def encode_shapes(self, bucket: int) -> None:
        """Run what isn't part of a step (a vision tower) on meta tensors, so that its ops are bound too."""

    def embed(self, step: StepBatch) -> Carry:
        """The carry before the first block."""
        return Carry(residual=self.embed_tokens(step), angles=self.rotary(step))

    def blocks(self, step: StepBatch, carry: Carry) -> Carry:
        """The carry after the last block."""
        for layer in self.layers:
            layer(step, carry)
        return carry

    def head(self, step: StepBatch, carry: Carry) -> torch.Tensor:
        """Logits of the wanted rows, [N, vocabulary]."""
        x, _ = self.norm(step, carry.hidden, carry.residual)
        return self.lm_head(step, x)

    def forward(self, step: StepBatch) -> torch.Tensor:
        """Logits of `step.logit_row`, [N, vocabulary]."""
        return self.head(step, self.blocks(step, self.embed(step)))
