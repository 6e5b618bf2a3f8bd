"""Kimi Delta Attention: a linear-attention mixer whose state forgets channel by channel (arXiv 2510.26692)."""

from __future__ import annotations

import torch

from firstlight.cache.spec import SlotSpec
from firstlight.nn.linear import COLUMNS, Linear
from firstlight.nn.module import Build, Module, Segment, WeightSpec
from firstlight.ops.channel_delta import channel_delta
from firstlight.ops.meta import concatenate
from firstlight.ops.op import CallSite
from firstlight.ops.rms_norm import rms_norm
from firstlight.ops.sigmoid_mul import sigmoid_mul
from firstlight.parallel import share
from firstlight.quant import plain
from firstlight.step import StepBatch


class ChannelDeltaNet(Module):
    """Projections, conv + gates + recurrence as one op, a norm of each head, an output gate, the output projection.

    Decay and output gate come from projections of low rank (`dim`), whose narrow halves all ranks hold. Heads split over ranks.
    """

    def __init__(self, build: Build, name: str, *, hidden: int, heads: int, dim: int, kernel: int, eps: float) -> None:
        super().__init__()
        tp, width = build.mesh.tp, heads * dim
        self.heads, self.dim, self.eps = share(heads, 1, tp, f"{name}: heads").size, dim, eps
        names = ("q", "k", "v")
        self.qkv_proj = Linear(build, [Segment(f"{name}.{part}_proj.weight", width, dim) for part in names], hidden)
        self.a_proj = Linear(build, [Segment(f"{name}.{part}_a_proj.weight", dim) for part in "fg"], hidden)
        self.f_b_proj = Linear(build, [Segment(f"{name}.f_b_proj.weight", width, dim)], dim)
        self.g_b_proj = Linear(build, [Segment(f"{name}.g_b_proj.weight", width, dim)], dim)
        self.b_proj = Linear(build, [Segment(f"{name}.b_proj.weight", heads, 1)], hidden)
        self.o_proj = Linear(build, [Segment(f"{name}.o_proj.weight", width, dim)], hidden, axis=COLUMNS)
        conv = tuple(Segment(f"{name}.{part}_conv1d.weight", width, dim) for part in names)
        self.declare("conv1d", WeightSpec((3 * width, kernel), (conv,), plain(build.dtype), tp, flatten=True))
        self.vector("A_log", f"{name}.A_log", heads, torch.float32, init="decay", group=tp, unit=1)
        self.vector("dt_bias", f"{name}.dt_bias", width, torch.float32, init="step", group=tp, unit=dim)
        self.vector("o_norm", f"{name}.o_norm.weight", dim, build.dtype, init="ones", group=tp)
        self.cache_spec = SlotSpec(
            {
                "conv": ((3 * self.heads * dim, kernel - 1), build.dtype),
                "state": ((self.heads, dim, dim), build.state_dtype),
            }
        )
        self.mix = {kind: CallSite(channel_delta, kind) for kind in ("decode", "prefill")}
        self.norm, self.gate = CallSite(rms_norm), CallSite(sigmoid_mul)

    def bind_cache(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take this layer's part of the slots: conv windows [slots, C, W-1] and states [slots, H, K, K]."""
        self.conv_pool, self.state_pool = tensors["conv"], tensors["state"]

    def forward(self, step: StepBatch, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], a partial sum over tensor-parallel ranks."""
        index = step.bucket.index
        mixed = self.qkv_proj(step, x)
        narrow = self.a_proj(step, x)
        f, z = self.f_b_proj(step, narrow[:, : self.dim]), self.g_b_proj(step, narrow[:, self.dim :])
        b = self.b_proj(step, x)
        results = []
        for part in step.parts:
            slots = part.slots(self.cache_spec.group)
            results.append(
                self.mix[part.kind][index](
                    part.rows_of(mixed),
                    part.rows_of(f),
                    part.rows_of(b),
                    self.conv1d,
                    self.A_log,
                    self.dt_bias,
                    self.conv_pool,
                    self.state_pool,
                    part.query_start,
                    slots.state_in,
                    slots.state_out,
                    slots.exports,
                    heads=self.heads,
                    dim=self.dim,
                    max_query=part.max_query,
                )
            )
        o = concatenate(results)
        y = self.norm[index](o, self.o_norm, eps=self.eps).flatten(1)
        return self.o_proj(step, self.gate[index](y, z))

    cache_spec: SlotSpec
    conv_pool: torch.Tensor
    state_pool: torch.Tensor
    conv1d: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    o_norm: torch.Tensor
