"""Attention with a sink: a logit of each head that takes part in the softmax and has no value (gpt-oss)."""

from __future__ import annotations

from typing import Any

from firstlight.nn.attention import Attention
from firstlight.nn.module import Build


class SinkAttention(Attention):
    """Grouped-query attention with sinks. window: how many keys a token sees, itself included; 0: all."""

    def __init__(self, build: Build, name: str, *, window: int, **sizes: Any) -> None:
        super().__init__(build, name, **sizes)
        self.window = window
        heads = sizes["heads"]
        self.vector("sinks", f"{name}.sinks", heads, build.dtype, init="zeros", group=build.mesh.tp, unit=1)
