"""Latent attention that sees only the keys that an indexer chooses (DeepSeek-V3.2)."""

from __future__ import annotations

from typing import Any

import torch

from firstlight.cache.spec import PagedSpec
from firstlight.nn.latent_attention import LATENT_EPS, LatentAttention
from firstlight.nn.linear import Linear
from firstlight.nn.module import Build, Module, Segment
from firstlight.ops.layer_norm import layer_norm
from firstlight.ops.op import CallSite
from firstlight.ops.rope import rope
from firstlight.ops.select_keys import select_keys
from firstlight.ops.write_latent import write_latent
from firstlight.step import StepBatch


class Indexer(Module):
    """Scores every earlier token with a few narrow heads, and keeps the places of the best.

    It is small, and all ranks hold the whole of it: they must agree on the places. Its keys have pages of their own.
    """

    def __init__(
        self, build: Build, name: str, *, hidden: int, q_rank: int, heads: int, dim: int, turned: int, top: int
    ) -> None:
        super().__init__()
        self.heads, self.dim, self.turned, self.top = heads, dim, turned, top
        self.wq_b = Linear(build, [Segment(f"{name}.wq_b.weight", heads * dim)], q_rank)
        self.wk = Linear(build, [Segment(f"{name}.wk.weight", dim)], hidden)
        self.weights_proj = Linear(build, [Segment(f"{name}.weights_proj.weight", heads)], hidden)
        tp = build.mesh.tp
        self.vector("k_norm", f"{name}.k_norm.weight", dim, build.dtype, init="ones", group=tp)
        self.vector("k_norm_bias", f"{name}.k_norm.bias", dim, build.dtype, init="zeros", group=tp)
        self.cache_spec = PagedSpec(1, dim, build.cache_dtype, group="index", names=("keys",))
        self.normalise, self.turn_q, self.turn_k = CallSite(layer_norm), CallSite(rope), CallSite(rope)
        self.write = CallSite(write_latent)
        self.choose = {kind: CallSite(select_keys, kind) for kind in ("decode", "prefill")}

    def bind_cache(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the view of this layer's pages, [pages, page_size, 1, dim]."""
        self.key_pages = tensors["keys"]

    def forward(self, step: StepBatch, x: torch.Tensor, latent_q: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """[T, H], [T, q_rank], angles -> places, [T, top] int32."""
        b = step.bucket.index
        q = self.turn_q[b](self.wq_b(step, latent_q).unflatten(-1, (self.heads, self.dim)), angles)
        key = self.normalise[b](self.wk(step, x), self.k_norm, self.k_norm_bias, eps=LATENT_EPS)
        key = self.turn_k[b](key.unsqueeze(1), angles).squeeze(1)
        table = step.tables[self.cache_spec.group]
        self.write[b](key[:, : self.turned], key[:, self.turned :], self.key_pages, table.slot)  # type: ignore[union-attr]
        weights = self.weights_proj(step, x)
        parts = step.parts
        out = None if len(parts) == 1 else q.new_empty((q.shape[0], self.top), dtype=torch.int32)
        for part in parts:
            pages = part.pages(self.cache_spec.group)
            result = self.choose[part.kind][b](
                part.rows_of(q),
                part.rows_of(weights),
                self.key_pages,
                pages.pages,
                pages.row,
                part.query_start,
                part.length,
                top=self.top,
                scale=(self.heads * self.dim) ** -0.5,
                max_query=part.max_query,
                max_context=part.max_context,
                out=None if out is None else out[part.tokens],
            )
            if out is None:
                out = result
        assert out is not None
        return out

    cache_spec: PagedSpec
    key_pages: torch.Tensor
    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor


class SparseLatentAttention(LatentAttention):
    """Latent attention with an indexer. index_heads, index_dim: its sizes; index_top: keys that a token sees at most."""

    def __init__(
        self, build: Build, name: str, *, index_heads: int, index_dim: int, index_top: int, **sizes: Any
    ) -> None:
        super().__init__(build, name, **sizes)
        self.indexer = Indexer(
            build,
            f"{name}.indexer",
            hidden=sizes["hidden"],
            q_rank=sizes["q_rank"],
            heads=index_heads,
            dim=index_dim,
            turned=sizes["turned"],
            top=index_top,
        )

    def select(
        self, step: StepBatch, x: torch.Tensor, latent_q: torch.Tensor | None, angles: torch.Tensor
    ) -> torch.Tensor | None:
        """The indexer's choice."""
        assert latent_q is not None
        places: torch.Tensor = self.indexer(step, x, latent_q, angles)
        return places
