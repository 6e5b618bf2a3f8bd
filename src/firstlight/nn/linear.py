"""Linear layers: fused where the checkpoint stores several projections of one input, and split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from firstlight.nn.module import Build, Module, Segment, WeightSpec
from firstlight.ops.linear import linear
from firstlight.ops.meta import concatenate
from firstlight.ops.op import CallSite
from firstlight.quant import Packed, Weight, plain
from firstlight.step import StepBatch

ROWS, COLUMNS = 0, 1


class Linear(Module):
    """y = x W^T (+ bias): [T, columns] -> [T, rows on this rank].

    Segments fill rows (outputs) or, with axis=COLUMNS, columns (inputs); in the latter case y is a partial sum over the
    tensor-parallel ranks. Neighbouring segments that are stored in one format are one weight; where a checkpoint mixes
    formats (GGUF), there is one weight and one product for each run.
    """

    def __init__(
        self, build: Build, segments: Sequence[Segment], rows_or_columns: int, *, axis: int = ROWS, bias: bool = False
    ) -> None:
        """rows_or_columns: the size of the dimension that segments don't fill."""
        super().__init__()
        self.dtype = build.dtype
        other = rows_or_columns
        group, init = build.mesh.tp, "branch" if axis == COLUMNS else "linear"
        runs = [list(run) for _, run in groupby(segments, key=lambda segment: build.scheme.format(segment.source))]
        self.names = [f"weight{i}" if i else "weight" for i in range(len(runs))]
        for name, run in zip(self.names, runs, strict=True):
            size = sum(segment.size for segment in run)
            shape = (size, other) if axis == ROWS else (other, size)
            form = build.scheme.format(run[0].source)
            self.declare(name, WeightSpec(shape, (tuple(run),), form, group, axis, init=init), build.dtype)
        self.bias: torch.Tensor | None = None
        if bias:
            self._declare_bias(build, segments, other, axis)
        self.product = CallSite(linear)
        self.more_products = [CallSite(linear) for _ in self.names[1:]]

    def _declare_bias(self, build: Build, segments: Sequence[Segment], other: int, axis: int) -> None:
        names = [segment.source.removesuffix("weight") + "bias" for segment in segments]
        if axis == ROWS:
            run = tuple(
                Segment(name, segment.size, segment.unit, segment.replicate, segment.ranges)
                for name, segment in zip(names, segments, strict=True)
            )
        elif build.mesh.tp.index == 0:  # partial sums are added up, so one rank adds the bias
            run = (Segment(names[0], other),)
        else:
            return
        size = sum(segment.size for segment in run)
        self.declare("bias", WeightSpec((size,), (run,), plain(build.dtype), build.mesh.tp, init="zeros"))

    def reads(self) -> Sequence[CallSite]:
        """Every product."""
        return self.product, *self.more_products

    def forward(self, step: StepBatch, x: Weight) -> torch.Tensor:
        """[T, columns] -> [T, rows]. x: plain, or packed as a `Handover` to `reads` has it."""
        b = step.bucket.index
        if not self.more_products:
            return self._multiplied(self.product[b], x, self.weight, self.bias)
        parts = [
            self._multiplied(site[b], x, getattr(self, name))
            for site, name in zip(self.reads(), self.names, strict=True)
        ]
        y = concatenate(parts, -1)
        return y if self.bias is None else y + self.bias

    def _multiplied(
        self, product: Callable[..., torch.Tensor], x: Weight, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(x, Packed) and isinstance(weight, Packed):
            return product(x, weight, bias, dtype=self.dtype)
        return product(x.plain if isinstance(x, Packed) else x, weight, bias)

    weight: Weight
