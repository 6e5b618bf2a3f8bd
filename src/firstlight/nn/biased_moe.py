"""A mixture of experts whose router adds a bias to choose, and doesn't count it: load is balanced without a loss.

("Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437.)
"""

from __future__ import annotations

from typing import Any

import torch

from firstlight.nn.mlp import MoE
from firstlight.nn.module import Build


class BiasedMoE(MoE):
    """Sigmoid scores, choice by score + bias among the best groups, and a shared expert that counts in full.

    shared: its intermediate size, or 0. scale: routed weights are multiplied by it.
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
        shared: int,
        renormalise: bool,
        groups: int,
        top_groups: int,
        scale: float,
    ) -> None:
        super().__init__(
            build,
            name,
            hidden=hidden,
            experts=experts,
            top_k=top_k,
            intermediate=intermediate,
            renormalise=renormalise,
            scoring="sigmoid",
        )
        tp = build.mesh.tp
        self.groups, self.top_groups, self.scale = groups, top_groups, scale
        self.vector("bias", f"{name}.gate.e_score_correction_bias", experts, torch.float32, init="zeros", group=tp)
        if shared:
            self.declare_shared(build, f"{name}.shared_experts", hidden, shared)

    def choice(self) -> dict[str, Any]:
        """How experts are chosen and weighted, as arguments of the op."""
        groups = {"bias": self.bias, "groups": self.groups, "top_groups": self.top_groups, "scale": self.scale}
        return super().choice() | groups

    bias: torch.Tensor
