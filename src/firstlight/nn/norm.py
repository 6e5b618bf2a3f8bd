"""Normalisations of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstlight.nn.module import Build, Module
from firstlight.ops.add_rms_norm import add_rms_norm
from firstlight.ops.op import CallSite, Handover
from firstlight.ops.rms_norm import rms_norm
from firstlight.quant import Weight
from firstlight.step import StepBatch


class AddNorm(Module):
    """Adds a block's output to the residual and normalises the sum.

    The output may be a partial sum over tensor-parallel ranks; it is reduced here, so that reduce + add + norm can be one
    kernel. zero_centred: the weight is stored as w and applied as 1 + w.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        size: int,
        eps: float,
        zero_centred: bool = False,
        readers: Sequence[CallSite] = (),
    ) -> None:
        """readers: every call site that reads the normalised sum, if it may be packed for them."""
        super().__init__()
        self.eps, self.zero_centred, self.group = eps, zero_centred, build.mesh.tp
        init = "zeros" if zero_centred else "ones"
        self.vector("weight", f"{name}.weight", size, build.dtype, init=init, group=build.mesh.tp)
        self.handover = Handover(readers)
        self.norm = CallSite(rms_norm, gives=self.handover)
        self.add_norm = CallSite(add_rms_norm, gives=self.handover)

    def forward(
        self, step: StepBatch, hidden: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[Weight, torch.Tensor]:
        """([T, H] or None, [T, H]) -> (normalised sum, sum)."""
        b = step.bucket.index
        given = {"eps": self.eps, "zero_centred": self.zero_centred, **self.handover[b]}
        if hidden is None:
            return self.norm[b](residual, self.weight, **given), residual
        return self.add_norm[b](hidden, residual, self.weight, group=self.group, **given)

    weight: torch.Tensor
