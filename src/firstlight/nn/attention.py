"""Softmax attention over a paged cache, with grouped KV heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstlight.cache.spec import PagedSpec
from firstlight.nn.linear import COLUMNS, Linear
from firstlight.nn.module import Build, Module, Segment
from firstlight.ops.attention import attention
from firstlight.ops.attention_prologue import attention_prologue
from firstlight.ops.op import CallSite, Handover
from firstlight.ops.sigmoid_mul import sigmoid_mul
from firstlight.parallel import share
from firstlight.quant import Weight
from firstlight.step import StepBatch


class Attention(Module):
    """q, k, v projections; q/k norm; rotary embedding; paged attention; output gate; output projection.

    gated: the q projection also makes an output gate, per head [q | gate]. head_norm: q and k are normalised per head.
    zero_centred: their norm weights are applied as 1 + w. KV heads are replicated where ranks outnumber them.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        gated: bool = False,
        head_norm: bool = False,
        zero_centred: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        tp = build.mesh.tp
        self.heads = share(heads, 1, tp, f"{name}: attention heads").size
        self.kv_heads = share(kv_heads, 1, tp, f"{name}: KV heads", replicate=True).size
        self.head_dim, self.eps, self.gated, self.zero_centred = head_dim, eps, gated, zero_centred
        self.scale = head_dim**-0.5
        q_unit = head_dim * (2 if gated else 1)
        self.qkv_proj = Linear(
            build,
            [
                Segment(f"{name}.q_proj.weight", heads * q_unit, q_unit),
                Segment(f"{name}.k_proj.weight", kv_heads * head_dim, head_dim, replicate=True),
                Segment(f"{name}.v_proj.weight", kv_heads * head_dim, head_dim, replicate=True),
            ],
            hidden,
            bias=bias,
        )
        output = Segment(f"{name}.o_proj.weight", heads * head_dim, head_dim)
        self.o_proj = Linear(build, [output], hidden, axis=COLUMNS, bias=bias)
        self.q_norm: torch.Tensor | None = None
        self.k_norm: torch.Tensor | None = None
        if head_norm:
            init = "zeros" if zero_centred else "ones"
            self.vector("q_norm", f"{name}.q_norm.weight", head_dim, build.dtype, init=init, group=tp)
            self.vector("k_norm", f"{name}.k_norm.weight", head_dim, build.dtype, init=init, group=tp)
        self.sinks: torch.Tensor | None = None
        self.window = 0
        self.cache_spec = PagedSpec(self.kv_heads, head_dim, build.cache_dtype)
        self.prologue = CallSite(attention_prologue)
        self.attend = {kind: CallSite(attention, kind) for kind in ("decode", "prefill")}
        self.handover = Handover(self.o_proj.reads())
        self.gate = CallSite(sigmoid_mul, gives=self.handover)

    def reads(self) -> Sequence[CallSite]:
        """The input projection."""
        return self.qkv_proj.reads()

    def bind_cache(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the views of this layer's pages: k and v, [pages, page_size, kv_heads, head_dim]."""
        self.k_pages, self.v_pages = tensors["k"], tensors["v"]

    def forward(self, step: StepBatch, x: Weight, angles: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], a partial sum over tensor-parallel ranks."""
        b = step.bucket.index
        group = self.cache_spec.group
        table = step.tables[group]
        q, gate = self.prologue[b](
            self.qkv_proj(step, x),
            self.q_norm,
            self.k_norm,
            angles,
            self.k_pages,
            self.v_pages,
            table.slot,  # type: ignore[union-attr]
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            gated=self.gated,
            eps=self.eps,
            zero_centred=self.zero_centred,
        )
        parts = step.parts
        out = None if len(parts) == 1 else q.new_empty(q.shape)
        for part in parts:
            pages = part.pages(group)
            result = self.attend[part.kind][b](
                part.rows_of(q),
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
        y = out.reshape(out.shape[0], self.heads * self.head_dim)
        if gate is not None:
            y = self.gate[b](y, gate, **self.handover[b])
        return self.o_proj(step, y)

    cache_spec: PagedSpec
    k_pages: torch.Tensor
    v_pages: torch.Tensor
