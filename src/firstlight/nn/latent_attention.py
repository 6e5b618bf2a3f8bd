"""Multi-head latent attention: keys and values come from one narrow row a token (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

import torch

from firstlight.cache.spec import PagedSpec
from firstlight.nn.linear import COLUMNS, Linear
from firstlight.nn.module import Build, Module, Segment, WeightSpec
from firstlight.ops.latent_attention import latent_attention
from firstlight.ops.latent_prologue import latent_prologue
from firstlight.ops.op import CallSite
from firstlight.ops.rms_norm import rms_norm
from firstlight.parallel import share
from firstlight.quant import Weight
from firstlight.step import StepBatch

LATENT_EPS = 1e-6
"""Of the norms inside, whatever the config says of the others."""


class LatentAttention(Module):
    """Narrow projections of queries and of keys with values, norms, widening of queries, attention, output projection.

    q_rank: width of the queries' latent, or 0 where queries are projected at once. kv_rank: of the cached latent. nope, turned:
    plain and rotary dimensions of a head's query and key. scale: of the scores. rotates: False where nothing turns.
    Heads split over ranks; the cache, one row a token, is held by all.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        *,
        hidden: int,
        heads: int,
        q_rank: int,
        kv_rank: int,
        nope: int,
        turned: int,
        value_dim: int,
        scale: float,
        rotates: bool = True,
    ) -> None:
        super().__init__()
        tp = build.mesh.tp
        self.heads = share(heads, 1, tp, f"{name}: attention heads").size
        self.q_rank, self.kv_rank, self.nope, self.value_dim = q_rank, kv_rank, nope, value_dim
        self.scale, self.rotates = scale, rotates
        width, widened = nope + turned, nope + value_dim
        kv_a = Segment(f"{name}.kv_a_proj_with_mqa.weight", kv_rank + turned)
        if q_rank:
            self.a_proj = Linear(build, [Segment(f"{name}.q_a_proj.weight", q_rank), kv_a], hidden)
            self.vector("q_norm", f"{name}.q_a_layernorm.weight", q_rank, build.dtype, init="ones", group=tp)
            self.q_proj = Linear(build, [Segment(f"{name}.q_b_proj.weight", heads * width, width)], q_rank)
        else:
            self.a_proj = Linear(build, [kv_a], hidden)
            self.q_proj = Linear(build, [Segment(f"{name}.q_proj.weight", heads * width, width)], hidden)
        self.vector("kv_norm", f"{name}.kv_a_layernorm.weight", kv_rank, build.dtype, init="ones", group=tp)
        kv_b = Segment(f"{name}.kv_b_proj.weight", heads * widened, widened)
        form = build.scheme.format(kv_b.source)
        self.declare("kv_b_proj", WeightSpec((heads * widened, kv_rank), ((kv_b,),), form, tp), build.dtype)
        output = Segment(f"{name}.o_proj.weight", heads * value_dim, value_dim)
        self.o_proj = Linear(build, [output], hidden, axis=COLUMNS)
        self.cache_spec = PagedSpec(1, kv_rank + turned, build.cache_dtype, names=("latent",))
        self.q_normalise = CallSite(rms_norm)
        self.prologue = CallSite(latent_prologue)
        self.attend = {kind: CallSite(latent_attention, kind) for kind in ("decode", "prefill")}

    def bind_cache(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the view of this layer's pages, [pages, page_size, 1, kv_rank + turned]."""
        self.latent_pages = tensors["latent"]

    def forward(self, step: StepBatch, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], a partial sum over tensor-parallel ranks."""
        b = step.bucket.index
        narrow = self.a_proj(step, x)
        latent_q = None
        if self.q_rank:
            latent_q = self.q_normalise[b](narrow[:, : self.q_rank], self.q_norm, eps=LATENT_EPS)
        q = self.q_proj(step, x if latent_q is None else latent_q)
        q = self.prologue[b](
            q,
            narrow[:, self.q_rank :],
            self.kv_norm,
            angles if self.rotates else None,
            self.latent_pages,
            step.tables[self.cache_spec.group].slot,  # type: ignore[union-attr]
            heads=self.heads,
            nope=self.nope,
            eps=LATENT_EPS,
        )
        selected = self.select(step, x, latent_q, angles)
        parts = step.parts
        out = None if len(parts) == 1 else q.new_empty((*q.shape[:2], self.value_dim))
        for part in parts:
            pages = part.pages(self.cache_spec.group)
            result = self.attend[part.kind][b](
                part.rows_of(q),
                self.latent_pages,
                pages.pages,
                pages.row,
                part.query_start,
                part.length,
                self.kv_b_proj,
                nope=self.nope,
                value_dim=self.value_dim,
                scale=self.scale,
                max_query=part.max_query,
                max_context=part.max_context,
                absorbed=part.kind == "decode",
                selected=None if selected is None else part.rows_of(selected),
                out=None if out is None else out[part.tokens],
            )
            if out is None:
                out = result
        assert out is not None
        return self.o_proj(step, out.flatten(1))

    def select(
        self, step: StepBatch, x: torch.Tensor, latent_q: torch.Tensor | None, angles: torch.Tensor
    ) -> torch.Tensor | None:
        """The places that each token sees, [T, n] int32; None: all. Families with sparse attention override it."""
        return None

    cache_spec: PagedSpec
    latent_pages: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    kv_b_proj: Weight
