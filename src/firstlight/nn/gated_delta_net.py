"""Gated DeltaNet: a linear-attention mixer whose state has a fixed size ("Gated Delta Networks", Yang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstlight.cache.spec import SlotSpec
from firstlight.nn.linear import COLUMNS, Linear
from firstlight.nn.module import Build, Module, Segment, WeightSpec
from firstlight.ops.gated_delta import gated_delta
from firstlight.ops.meta import concatenate_tokens
from firstlight.ops.op import CallSite, Handover
from firstlight.parallel import share
from firstlight.quant import Weight, plain
from firstlight.step import StepBatch

Ranges = tuple[tuple[int, int], ...]


class GatedDeltaNet(Module):
    """Projections, then conv + gates + recurrence + gated norm as one op, then the output projection.

    interleaved: the checkpoint stores q, k, v, z interleaved per key head (`in_proj_qkvz`, `in_proj_ba` of Qwen3-Next);
    otherwise as `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`. In memory both are rows q | k | v | z and b | a.
    Ranks split key heads, each with its value heads.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        *,
        hidden: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
        interleaved: bool,
    ) -> None:
        super().__init__()
        tp = build.mesh.tp
        if value_heads % key_heads:
            raise ValueError(f"{name}: {value_heads} value heads are not a multiple of {key_heads} key heads")
        ratio = value_heads // key_heads
        self.key_heads = share(key_heads, 1, tp, f"{name}: key heads").size
        self.value_heads = self.key_heads * ratio
        self.key_dim, self.value_dim, self.eps = key_dim, value_dim, eps
        keys, values = key_heads * key_dim, value_heads * value_dim
        value_unit = ratio * value_dim
        sizes = {"q": (keys, key_dim), "k": (keys, key_dim), "v": (values, value_unit), "z": (values, value_unit)}
        gates = {"b": (value_heads, ratio), "a": (value_heads, ratio)}
        if interleaved:
            qkvz = _interleaved(f"{name}.in_proj_qkvz.weight", sizes, key_heads)
            ba = _interleaved(f"{name}.in_proj_ba.weight", gates, key_heads)
        else:
            qkv = {part: sizes[part] for part in "qkv"}
            qkvz = [
                *_consecutive(f"{name}.in_proj_qkv.weight", qkv),
                Segment(f"{name}.in_proj_z.weight", values, value_unit),
            ]
            ba = [Segment(f"{name}.in_proj_{part}.weight", value_heads, ratio) for part in "ba"]
        self.in_proj_qkvz = Linear(build, qkvz, hidden)
        self.in_proj_ba = Linear(build, ba, hidden)
        self.out_proj = Linear(build, [Segment(f"{name}.out_proj.weight", values, value_unit)], hidden, axis=COLUMNS)
        conv = tuple(_consecutive(f"{name}.conv1d.weight", {part: sizes[part] for part in "qkv"}))
        shape = (2 * keys + values, kernel)
        self.declare("conv1d", WeightSpec(shape, (conv,), plain(build.dtype), tp, flatten=True, init="linear"))
        self.vector("A_log", f"{name}.A_log", value_heads, torch.float32, init="decay", group=tp, unit=ratio)
        self.vector("dt_bias", f"{name}.dt_bias", value_heads, torch.float32, init="step", group=tp, unit=ratio)
        self.vector("norm", f"{name}.norm.weight", value_dim, build.dtype, init="ones", group=tp)
        channels = 2 * self.key_heads * key_dim + self.value_heads * value_dim
        self.channels = channels
        self.cache_spec = SlotSpec(
            {
                "conv": ((channels, kernel - 1), build.dtype),
                "state": ((self.value_heads, value_dim, key_dim), build.state_dtype),
            }
        )
        self.handover = Handover(self.out_proj.reads())
        self.mix = {kind: CallSite(gated_delta, kind, self.handover) for kind in ("decode", "prefill")}

    def reads(self) -> Sequence[CallSite]:
        """Both input projections."""
        return *self.in_proj_qkvz.reads(), *self.in_proj_ba.reads()

    def bind_cache(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take this layer's part of the slots: conv windows [slots, C, W-1] and states [slots, HV, V, K]."""
        self.conv_pool, self.state_pool = tensors["conv"], tensors["state"]

    def forward(self, step: StepBatch, x: Weight, angles: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], a partial sum over tensor-parallel ranks."""
        b = step.bucket.index
        qkvz = self.in_proj_qkvz(step, x)
        ba = self.in_proj_ba(step, x)
        mixed, z = qkvz.split_with_sizes((self.channels, self.value_heads * self.value_dim), dim=1)
        beta, a = ba.split_with_sizes((self.value_heads, self.value_heads), dim=1)
        results = []
        for part in step.parts:
            slots = part.slots(self.cache_spec.group)
            results.append(
                self.mix[part.kind][b](
                    part.rows_of(mixed),
                    part.rows_of(z),
                    part.rows_of(a),
                    part.rows_of(beta),
                    self.conv1d,
                    self.A_log,
                    self.dt_bias,
                    self.norm,
                    self.conv_pool,
                    self.state_pool,
                    part.query_start,
                    slots.state_in,
                    slots.state_out,
                    slots.exports,
                    key_heads=self.key_heads,
                    value_heads=self.value_heads,
                    key_dim=self.key_dim,
                    value_dim=self.value_dim,
                    eps=self.eps,
                    max_query=part.max_query,
                    **self.handover[b],
                )
            )
        return self.out_proj(step, concatenate_tokens(results))

    cache_spec: SlotSpec
    conv_pool: torch.Tensor
    state_pool: torch.Tensor
    conv1d: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor


def _consecutive(source: str, sizes: dict[str, tuple[int, int]]) -> list[Segment]:
    """Segments that lie one after another in one tensor."""
    segments, start = [], 0
    for size, unit in sizes.values():
        segments.append(Segment(source, size, unit, ranges=((start, start + size),)))
        start += size
    return segments


def _interleaved(source: str, sizes: dict[str, tuple[int, int]], groups: int) -> list[Segment]:
    """Segments of which each of `groups` groups of one tensor holds an equal part, in the order of `sizes`."""
    group_size = sum(size for size, _ in sizes.values()) // groups
    segments, offset = [], 0
    for size, unit in sizes.values():
        part = size // groups
        ranges: Ranges = tuple((g * group_size + offset, g * group_size + offset + part) for g in range(groups))
        segments.append(Segment(source, size, unit, ranges=ranges))
        offset += part
    return segments
