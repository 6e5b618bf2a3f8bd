"""Attention with a sink: a logit of each head that takes part in the softmax and has no value (gpt-oss)."""

from __future__ import annotations

from typing import Any

import torch

from firstlight.nn.attention import Attention
from firstlight.nn.module import Build
from firstlight.step import StepBatch


class SinkAttention(Attention):
    """Grouped-query attention with sinks. window: how many keys a token sees, itself included; 0: all."""

    def __init__(self, build: Build, name: str, *, window: int, **sizes: Any) -> None:
        super().__init__(build, name, **sizes)
        self.window = window
        heads = sizes["heads"]
        self.vector("sinks", f"{name}.sinks", heads, build.dtype, init="zeros", group=build.mesh.tp, unit=1)

    def forward(self, step: StepBatch, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], a partial sum over tensor-parallel ranks."""
        b = step.bucket.index
        group = self.cache_spec.group
        q, _ = self.prologue[b](
            self.qkv_proj(step, x),
            self.q_norm,
            self.k_norm,
            angles,
            self.k_pages,
            self.v_pages,
            step.tables[group].slot,  # type: ignore[union-attr]
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        parts = step.parts
        out = None if len(parts) == 1 else torch.empty_like(q)
        for part in parts:
            pages = part.pages(group)
            result = self.attend[part.kind][b](
                q[part.tokens],
                self.k_pages,
                self.v_pages,
                pages.pages,
                pages.row,
                part.query_start,
                part.length,
                scale=self.scale,
                max_query=part.max_query,
                max_context=part.max_context,
                out=None if out is None else out[part.tokens],
                sinks=self.sinks,
                window=self.window,
            )
            if out is None:
                out = result
        assert out is not None
        return self.o_proj(step, out.flatten(1))

    sinks: torch.Tensor
