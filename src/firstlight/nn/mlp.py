"""Feed-forward layers: SwiGLU, and a mixture of SwiGLU experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firstlight.nn.linear import COLUMNS, Linear
from firstlight.nn.module import Build, Module, Segment, WeightSpec
from firstlight.ops.moe import moe
from firstlight.ops.op import CallSite, Handover
from firstlight.ops.silu_mul import silu_mul
from firstlight.parallel import Share, share
from firstlight.quant import Weight, plain
from firstlight.step import StepBatch


class MLP(Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, build: Build, name: str, hidden: int, intermediate: int, bias: bool = False) -> None:
        super().__init__()
        gate_up = [Segment(f"{name}.{part}_proj.weight", intermediate, 1) for part in ("gate", "up")]
        self.gate_up_proj = Linear(build, gate_up, hidden, bias=bias)
        down = [Segment(f"{name}.down_proj.weight", intermediate, 1)]
        self.down_proj = Linear(build, down, hidden, axis=COLUMNS, bias=bias)
        self.handover = Handover(self.down_proj.reads())
        self.activation = CallSite(silu_mul, gives=self.handover)

    def reads(self) -> Sequence[CallSite]:
        """The input projection."""
        return self.gate_up_proj.reads()

    def forward(self, step: StepBatch, x: Weight) -> torch.Tensor:
        """[T, H] -> [T, H], a partial sum over tensor-parallel ranks."""
        b = step.bucket.index
        return self.down_proj(step, self.activation[b](self.gate_up_proj(step, x), **self.handover[b]))


class MoE(Module):
    """Routed experts and, with `shared` > 0, a gated shared expert, as one op.

    Experts are split over ep ranks, each expert's intermediate size over tp ranks. Both published forms load: one tensor
    for each expert's projection, and stacks `experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I].
    """

    def __init__(
        self,
        build: Build,
        name: str,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        intermediate: int,
        shared: int = 0,
        renormalise: bool = True,
        scoring: str = "softmax",
    ) -> None:
        super().__init__()
        tp, ep = build.mesh.tp, build.mesh.ep
        held = share(experts, 1, ep, f"{name}: experts")
        self.first_expert, self.top_k, self.renormalise, self.scoring = held.start, top_k, renormalise, scoring
        router = Segment(f"{name}.gate.weight", experts)
        self.declare("router", WeightSpec((experts, hidden), ((router,),), plain(build.dtype), tp))
        self._declare_experts(build, name, (experts, hidden, intermediate), held)
        self.shared_gate_up_proj: Weight | None = None
        self.shared_down_proj: Weight | None = None
        self.shared_gate: torch.Tensor | None = None
        if shared:
            self.declare_shared(build, f"{name}.shared_expert", hidden, shared)
            gate = Segment(f"{name}.shared_expert_gate.weight", 1)
            self.declare("shared_gate", WeightSpec((1, hidden), ((gate,),), plain(build.dtype), tp))
        self.mixture = CallSite(moe)

    def declare_shared(self, build: Build, prefix: str, hidden: int, intermediate: int) -> None:
        """The shared expert's gate | up [2I, H] and down [H, I], stored under `prefix`."""
        tp = build.mesh.tp
        parts = tuple(Segment(f"{prefix}.{part}_proj.weight", intermediate, 1) for part in ("gate", "up"))
        spec = WeightSpec((2 * intermediate, hidden), (parts,), self.common_format(build, parts), tp)
        self.declare("shared_gate_up_proj", spec, build.dtype)
        down = Segment(f"{prefix}.down_proj.weight", intermediate, 1)
        spec = WeightSpec(
            (hidden, intermediate), ((down,),), build.scheme.format(down.source), tp, axis=1, init="branch"
        )
        self.declare("shared_down_proj", spec, build.dtype)

    def _declare_experts(self, build: Build, name: str, sizes: tuple[int, int, int], held: Share) -> None:
        """The stacks [E, 2I, H] and [E, H, I], stored as one tensor an expert or as stacks. sizes: E, H, I."""
        experts, hidden, intermediate = sizes
        tp, one = build.mesh.tp, f"{name}.experts.{{expert}}"
        apart = tuple(Segment(f"{one}.{part}_proj.weight", intermediate, 1) for part in ("gate", "up"))
        stacked = tuple(
            Segment(
                f"{name}.experts.gate_up_proj", intermediate, 1, ranges=((i * intermediate, (i + 1) * intermediate),)
            )
            for i in range(2)
        )
        shape, form = (experts, 2 * intermediate, hidden), self.common_format(build, apart)
        self.declare("gate_up_proj", WeightSpec(shape, (apart, stacked), form, tp, axis=1, experts=held), build.dtype)
        forms = tuple(
            (Segment(source, intermediate, 1),) for source in (f"{one}.down_proj.weight", f"{name}.experts.down_proj")
        )
        shape, form = (experts, hidden, intermediate), build.scheme.format(forms[0][0].source)
        self.declare("down_proj", WeightSpec(shape, forms, form, tp, axis=2, experts=held, init="branch"), build.dtype)

    def forward(self, step: StepBatch, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], a partial sum over tensor-parallel (and expert-parallel) ranks."""
        return self.mixture[step.bucket.index](
            x,
            self.router,
            self.gate_up_proj,
            self.down_proj,
            self.shared_gate_up_proj,
            self.shared_down_proj,
            self.shared_gate,
            live=step.live,
            first_expert=self.first_expert,
            **self.choice(),
        )

    def choice(self) -> dict[str, Any]:
        """How experts are chosen and weighted, as arguments of the op."""
        return {"top_k": self.top_k, "scoring": self.scoring, "renormalise": self.renormalise}

    router: torch.Tensor
    gate_up_proj: Weight
    down_proj: Weight
