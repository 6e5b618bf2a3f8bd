"""What a change would give: the same step, priced again with one thing different."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from firstlight.cache.spec import SlotSpec
from firstlight.hardware import Hardware
from firstlight.models import CausalModel
from firstlight.nn.module import caches
from firstlight.predict.layout import Layout, build, step_model
from firstlight.predict.shape import StepShape
from firstlight.predict.speculation import Speculation, decode_seconds
from firstlight.predict.step_time import StepModel

MOST_REPLICAS = 8
"""GPUs that the change to expert parallelism takes, at most."""


@dataclass(frozen=True, slots=True)
class Change:
    """name: for people. seconds: of the step, or a token where it speculates. gpus: that it takes. lossy: changes answers.

    replicas: attention replicas, each of which brings a batch of its own.
    """

    name: str
    seconds: float
    gpus: int
    lossy: bool
    replicas: int = 1

    def rate(self, tokens: float) -> float:
        """Tokens a second and GPU, of `tokens` in a replica's step."""
        return tokens * self.replicas / self.seconds / self.gpus


def changes(
    config: Mapping[str, Any], model: CausalModel, priced: StepModel, layout: Layout, shape: StepShape
) -> Iterator[Change]:
    """Every change that applies to the model, with what the step then takes."""
    hardware = priced.hardware
    for name, other, lossy in _layouts(model, layout, hardware):
        try:
            changed = step_model(build(config, other), hardware, other, priced.conditions)
        except ValueError:  # the mesh can't split this model so
            continue
        yield Change(name, float(changed.time(shape).seconds[0]), other.mesh.size, lossy, other.data_parallel)
    gpus, replicas = layout.mesh.size, layout.data_parallel
    if float(shape.decode.requests) and not float(shape.prefill.requests):
        requests = int(shape.decode.requests)
        context = float(shape.decode.keys) / requests
        guess = Speculation(3, 0.8)
        seconds = float(decode_seconds(priced, requests, context, guess)[0])
        yield Change(f"3 drafts, {guess.acceptance:.0%} of each right (a token)", seconds, gpus, False, replicas)
    if priced.mesh.ep.size > 1 and not priced.conditions.two_batch_overlap:
        overlapped = replace(priced, conditions=replace(priced.conditions, two_batch_overlap=True))
        yield Change("two-batch overlap", float(overlapped.time(shape).seconds[0]), gpus, False, replicas)


def _layouts(model: CausalModel, layout: Layout, hardware: Hardware) -> Iterator[tuple[str, Layout, bool]]:
    float8 = "float8_e4m3fn" in hardware.peak
    plain = any(
        spec.format.is_plain and spec.format.torch_dtype.itemsize == 2 and len(spec.shape) > 1
        for module in model.layers.modules()
        for spec in getattr(module, "weight_specs", {}).values()
        if spec.init == "linear" and min(spec.shape[-2:]) >= 512
    )
    if float8 and plain and not layout.float8_weights:
        yield "FP8 weights", replace(layout, float8_weights=True), True
    if float8 and "weight" in model.lm_head.weight_specs and not layout.float8_head:
        yield "FP8 head", replace(layout, float8_head=True), True
    if not layout.float8_cache:
        yield "FP8 KV cache", replace(layout, float8_cache=True), True
    if any(isinstance(spec, SlotSpec) for spec in caches(model).values()) and not layout.bfloat16_state:
        yield "bfloat16 state", replace(layout, bfloat16_state=True), True
    wider = layout.tensor_parallel * 2
    if layout.expert_parallel == 1 and wider <= hardware.links[0].reach:
        yield f"tensor parallel over {wider} GPUs", replace(layout, tensor_parallel=wider), False
    reach = min(hardware.links[0].reach, MOST_REPLICAS)
    if model.config.num_experts and layout.mesh.size == 1:
        spread = replace(layout, data_parallel=reach, expert_parallel=reach)
        yield f"experts over {reach} GPUs, attention on each (its own batch)", spread, False
