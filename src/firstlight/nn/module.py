"""What every module is made of: declared weights that know how they split, and call sites of ops.

A weight is declared once, as data. From that one description come its shape on this rank, which part of which checkpoint
tensor fills it, how FP8 scales follow the cut, its random initial values, and the bytes that a prediction counts.
Weights are plain attributes on the meta device until the loader (or `weights.random`) replaces them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from firstlight.cache.spec import CacheSpec
from firstlight.ops.op import CallSite
from firstlight.parallel import Group, Mesh, Share, share
from firstlight.quant import WHOLE_ROW, Format, Packed, Scheme, Weight, plain
from firstlight.quant.blocks import scale_shape
from firstlight.quant.gguf_blocks import GGML_TYPES, bytes_per_row

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Build:
    """What modules are built for: the mesh, the activations' dtype, the formats of weights, the dtypes of KV and of recurrent states."""

    mesh: Mesh
    dtype: torch.dtype
    scheme: Scheme
    cache_dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a weight, along the dimension that it is filled and split in, that one checkpoint tensor fills.

    source: the tensor's name; "{expert}" in it stands for the number of an expert of a stack.
    size: length of the run in the whole (unsharded) weight.
    unit: the split over ranks keeps runs of `unit` together (a head); None: every rank holds all of it.
    replicate: fewer units than ranks are shared (KV heads).
    ranges: where the run is in the source, in the run's order; None: the source from its beginning.
    """

    source: str
    size: int
    unit: int | None = None
    replicate: bool = False
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def end(self) -> int:
        """Where its last part ends in the source."""
        return max(stop for _, stop in self.ranges) if self.ranges else self.size


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to copy: [start, stop) of the source along the split dimension goes to `target` onwards in the weight."""

    source: str
    start: int
    stop: int
    target: int


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight of a module.

    shape: of the whole weight. axis: the dimension that segments fill, one after another, and that splits over `group`.
    forms: the published ways to store it; the first whose tensors are all there is used. format: as stored and kept.
    experts: for a stack, the range of the leading dimension that this rank holds.
    init: how random weights are drawn: "linear", "branch" (what adds to the residual), "embedding", "ones", "zeros", "decay" (A_log), "step" (dt_bias).
    flatten: the stored tensor has more dimensions; those after the first are one (convolutions).
    """

    shape: tuple[int, ...]
    forms: tuple[tuple[Segment, ...], ...]
    format: Format
    group: Group
    axis: int = 0
    experts: Share | None = None
    init: str = "linear"
    flatten: bool = False

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of the first form: sizes and splits are the same in all."""
        return self.forms[0]

    def shares(self) -> list[Share]:
        """What this rank holds of each segment."""
        return [self.share(segment) for segment in self.segments]

    def share(self, segment: Segment) -> Share:
        """What this rank holds of a segment. Raises ValueError if its units can't be dealt out evenly."""
        if segment.unit is None:
            return Share(0, segment.size)
        return share(segment.size, segment.unit, self.group, segment.source, segment.replicate)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on this rank."""
        shape = list(self.shape)
        shape[self.axis] = sum(part.size for part in self.shares())
        if self.experts is not None:
            shape[0] = self.experts.size
        return tuple(shape)

    def pieces(self, form: tuple[Segment, ...]) -> Iterator[Piece]:
        """What to copy from where, along the axis, for this rank."""
        target = 0
        for segment in form:
            held = self.share(segment)
            skipped = 0
            for start, stop in segment.ranges or ((0, segment.size),):
                first, last = max(held.start, skipped), min(held.stop, skipped + stop - start)
                if first < last:
                    yield Piece(
                        segment.source, start + first - skipped, start + last - skipped, target + first - held.start
                    )
                skipped += stop - start
            target += held.size

    @property
    def local_format(self) -> Format:
        """The format on this rank: scale blocks shrink to the largest size that every cut respects, so values stay exact. A
        scale of a whole row is that of each rank's part of it."""
        if self.format.block is None:
            return self.format
        block = list(self.format.block)
        dimension = self.axis - len(self.shape) + 2  # 0: rows, 1: columns of the trailing matrix
        if dimension in (0, 1) and block[dimension] != WHOLE_ROW:
            for form in self.forms:
                for piece in self.pieces(form):
                    block[dimension] = math.gcd(block[dimension], piece.start, piece.target)
        return replace(self.format, block=(block[0], block[1]))

    @property
    def cuts_blocks(self) -> bool:
        """Whether this rank's part begins or ends inside a GGUF block, which holds its scale and can't be cut."""
        if self.format.dtype not in GGML_TYPES or self.axis != len(self.shape) - 1:
            return False
        size = GGML_TYPES[self.format.dtype].weights
        return any(
            edge % size
            for form in self.forms
            for piece in self.pieces(form)
            for edge in (piece.start, piece.stop, piece.target)
        )

    def empty(self, device: torch.device | str) -> Weight:
        """Room for the weight, uninitialised."""
        shape, form = self.local_shape, self.local_format
        if form.is_plain:
            return torch.empty(shape, dtype=form.torch_dtype, device=device)
        if form.block is not None:
            assert form.scale_dtype is not None
            data = torch.empty(shape, dtype=form.torch_dtype, device=device)
            scale = torch.empty(scale_shape(shape, form.block), dtype=getattr(torch, form.scale_dtype), device=device)
            return Packed({"data": data, "scale": scale}, form, shape)
        data = torch.empty((*shape[:-1], bytes_per_row(shape[-1], form.dtype)), dtype=torch.uint8, device=device)
        return Packed({"data": data}, form, shape)


class Module(torch.nn.Module):
    """A module with declared weights. `weight_specs` maps an attribute to its description."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_specs: dict[str, WeightSpec] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward`, past torch's own call, which on the host takes as long as launching a kernel; unless there are hooks."""
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def declare(self, attribute: str, spec: WeightSpec, dtype: torch.dtype | None = None) -> None:
        """Declare a weight; the attribute holds a meta tensor (or Packed of meta tensors) until it is loaded.

        dtype: what a weight becomes if this rank's cut goes through the blocks of its format (GGUF), which then can't stay.
        """
        if dtype is not None and spec.cuts_blocks:
            logger.warning("%s: split through its %s blocks; kept as %s", spec.segments[0].source, spec.format, dtype)
            spec = replace(spec, format=plain(dtype))
        self.weight_specs[attribute] = spec
        setattr(self, attribute, spec.empty("meta"))

    def common_format(self, build: Build, segments: Sequence[Segment]) -> Format:
        """The format of a weight that can't be split by format; plain where a checkpoint mixes them (GGUF)."""
        forms = {build.scheme.format(segment.source) for segment in segments}
        return forms.pop() if len(forms) == 1 else plain(build.dtype)

    def vector(
        self,
        attribute: str,
        source: str,
        size: int,
        dtype: torch.dtype,
        *,
        init: str,
        group: Group,
        unit: int | None = None,
    ) -> None:
        """Declare a one-dimensional weight in high precision."""
        self.declare(attribute, WeightSpec((size,), ((Segment(source, size, unit),),), plain(dtype), group, init=init))

    def reads(self) -> Sequence[CallSite]:
        """The call sites that read the module's input, if they are all that do and may get it packed; none: it has to be plain."""
        return ()

    cache_spec: CacheSpec | None = None
    """What this module keeps between steps."""

    def bind_cache(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the pool's views of what `cache_spec` asked for. Modules with a cache override it."""
        raise NotImplementedError(f"{type(self).__name__} keeps nothing between steps")


def caches(model: torch.nn.Module) -> dict[str, CacheSpec]:
    """What every module of a model keeps between steps, by path."""
    return {
        path: module.cache_spec
        for path, module in model.named_modules()
        if isinstance(module, Module) and module.cache_spec is not None
    }


@dataclass(slots=True)
class Carry:
    """What flows from block to block.

    hidden: [T, H], the last mixer's or MLP's output, a partial sum over tensor-parallel ranks; None before the first.
    residual: [T, H]. angles: [T, 2F] float32 cos | sin of this step's positions.
    """

    residual: torch.Tensor
    angles: torch.Tensor
    hidden: torch.Tensor | None = None
