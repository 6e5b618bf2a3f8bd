"""gpt-oss: attention with sinks, every other layer over a window, and experts in MXFP4.

It can be predicted, not run yet: MXFP4 weights have room and bytes here, and no unpacking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from firstlight.models.causal import CausalModel
from firstlight.models.config import MOST_LAYERS, Reader, TextConfig, parse_text, text_section
from firstlight.nn.module import Build, Module, Segment, WeightSpec
from firstlight.nn.sink_attention import SinkAttention
from firstlight.ops.clamped_experts import clamped_experts
from firstlight.ops.linear import linear
from firstlight.ops.op import CallSite
from firstlight.ops.route import route
from firstlight.parallel import share
from firstlight.quant import Format, Packed, Weight, plain
from firstlight.step import StepBatch

SLIDING = "sliding_attention"
MXFP4 = Format("mxfp4", (1, 32), "uint8")
"""Two elements of four bits a byte, and a power of two for each 32 columns."""


@dataclass(frozen=True, slots=True)
class Mxfp4Spec(WeightSpec):
    """A weight of 4-bit elements: data [..., K / 2] and scale [..., K / 32], both uint8."""

    def empty(self, device: torch.device | str) -> Weight:
        """Room for the weight, uninitialised."""
        *outer, columns = shape = self.local_shape
        parts = {
            name: torch.empty((*outer, -(-columns // of)), dtype=torch.uint8, device=device)
            for name, of in (("data", 2), ("scale", 32))
        }
        return Packed(parts, MXFP4, shape)


@dataclass(frozen=True, slots=True)
class WindowConfig(TextConfig):
    """A text config with the window of each layer (0: none) and the clamp of the experts' activation."""

    windows: tuple[int, ...] = ()
    swiglu_limit: float = 7.0


class ClampedMoE(Module):
    """Router with a bias, top k before softmax, and clamped experts."""

    def __init__(self, build: Build, name: str, text: WindowConfig, packed: bool) -> None:
        super().__init__()
        tp, hidden, inner = build.mesh.tp, text.hidden_size, text.intermediate_size
        held = share(text.num_experts, 1, build.mesh.ep, f"{name}: experts")
        self.first_expert, self.top_k, self.limit = held.start, text.num_experts_per_tok, text.swiglu_limit
        router = Segment(f"{name}.router.weight", text.num_experts)
        self.declare("router", WeightSpec((text.num_experts, hidden), ((router,),), plain(build.dtype), tp))
        self.vector("router_bias", f"{name}.router.bias", text.num_experts, build.dtype, init="zeros", group=tp)
        kind, form = (Mxfp4Spec, MXFP4) if packed else (WeightSpec, plain(build.dtype))
        suffix = "_blocks" if packed else ""
        both = Segment(f"{name}.experts.gate_up_proj{suffix}", 2 * inner, 2)
        shape = (text.num_experts, 2 * inner, hidden)
        self.declare("gate_up_proj", kind(shape, ((both,),), form, tp, axis=1, experts=held))
        down = Segment(f"{name}.experts.down_proj{suffix}", inner, 1)
        shape = (text.num_experts, hidden, inner)
        self.declare("down_proj", kind(shape, ((down,),), form, tp, axis=2, experts=held))
        both = Segment(f"{name}.experts.gate_up_proj_bias", 2 * inner, 2)
        bias = WeightSpec((text.num_experts, 2 * inner), ((both,),), plain(build.dtype), tp, axis=1, experts=held)
        self.declare("gate_up_bias", bias)
        down = Segment(f"{name}.experts.down_proj_bias", hidden)
        bias = WeightSpec((text.num_experts, hidden), ((down,),), plain(build.dtype), tp, axis=1, experts=held)
        self.declare("down_bias", bias)
        self.score, self.choose, self.experts = CallSite(linear), CallSite(route), CallSite(clamped_experts)

    def forward(self, step: StepBatch, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], a partial sum over tensor-parallel (and expert-parallel) ranks."""
        b = step.bucket.index
        # Softmax over the chosen logits is softmax over all, renormalised over the chosen.
        weights, chosen = self.choose[b](
            self.score[b](x, self.router, self.router_bias), top_k=self.top_k, renormalise=True, live=step.live
        )
        return self.experts[b](
            x,
            weights,
            chosen,
            self.gate_up_proj,
            self.gate_up_bias,
            self.down_proj,
            self.down_bias,
            limit=self.limit,
            first_expert=self.first_expert,
        )

    router: torch.Tensor
    router_bias: torch.Tensor
    gate_up_proj: Weight
    gate_up_bias: torch.Tensor
    down_proj: Weight
    down_bias: torch.Tensor


class Model(CausalModel):
    """GptOssForCausalLM."""

    config: WindowConfig

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> WindowConfig:
        """Windows by layer, from `layer_types` and `sliding_window`; without the types, every other layer has one."""
        text = text_section(config)
        read = Reader(text)
        layers = read.integer("num_hidden_layers", most=MOST_LAYERS)
        kinds = text.get("layer_types") or [SLIDING if i % 2 == 0 else "full_attention" for i in range(layers)]
        experts = read.integer("num_local_experts")
        plain_text = parse_text({**text, "layer_types": None, "num_experts": experts, "use_sliding_window": False})
        window = read.integer("sliding_window", 128)
        return WindowConfig(
            **{field.name: getattr(plain_text, field.name) for field in fields(TextConfig)},
            windows=tuple(window if kind == SLIDING else 0 for kind in kinds[:layers]),
            swiglu_limit=read.number("swiglu_limit", 7.0),
        )

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        method = (config.get("quantization_config") or {}).get("quant_method")
        self.packed = method == "mxfp4"
        super().__init__(config, build)

    def mixer(self, build: Build, name: str, layer: int) -> Module:
        """Attention with sinks."""
        text = self.config
        return SinkAttention(
            build,
            f"{name}.self_attn",
            window=text.windows[layer],
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            eps=text.rms_norm_eps,
            bias=text.attention_bias,
        )

    def mlp(self, build: Build, name: str, layer: int) -> Module:
        """Clamped experts in every layer."""
        return ClampedMoE(build, f"{name}.mlp", self.config, self.packed)
