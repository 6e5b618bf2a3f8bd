"""A step of an engine op by op: what each takes, what it should take at least, who computes it and why nobody else does.

The step runs once under an observer that keeps every call. Calls that agree in op, place and shapes (the layers' own) are one
line; they are timed together in a CUDA graph, one after another, so each finds its weights as cold as in the step. The sum
stands beside the time of the whole step in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from firstlight.calibrate.engine_step import place_step, step_runner
from firstlight.calibrate.timing import CaptureError, once, seconds_of
from firstlight.engine.batch import HostStep
from firstlight.engine.engine import Engine
from firstlight.engine.executor import Executor
from firstlight.errors import FirstlightError
from firstlight.hardware import Hardware
from firstlight.ops.binding import Choice
from firstlight.ops.meta import specs, without_data
from firstlight.ops.observe import Bound, observed
from firstlight.ops.op import Shape, across_layers, sites
from firstlight.predict.shape import distinct_experts
from firstlight.step import Bucket


@dataclass(slots=True)
class Line:
    """Calls of one op at the same place of several layers.

    count: calls in the step. seconds, floor: of one call; floor: the larger of bytes over bandwidth and operations over
    the peak, 0 where the hardware's peaks aren't known. provider: who computes it ("a + b": the parts of a composite).
    refused: (provider, reason) of the others. launch_bound: timed call by call, since no graph could hold it.
    """

    op: str
    where: str
    count: int
    seconds: float
    floor: float
    provider: str
    refused: tuple[tuple[str, str], ...]
    launch_bound: bool = False


@dataclass(slots=True)
class Profile:
    """lines: in the order of their first call. whole: seconds of the step in one graph, or op by op (`captured` False)."""

    lines: list[Line]
    whole: float
    captured: bool
    bucket: Bucket
    tokens: int

    @property
    def total(self) -> float:
        """Seconds of all calls timed apart."""
        return sum(line.seconds * line.count for line in self.lines)


def profile(engine: Engine, *, batch: int, context: int, prefill: int = 0) -> Profile:
    """Time a step of `batch` requests that decode at `context` tokens, beside one prompt of `prefill` new tokens, if any.

    The prompt has `context` tokens with the new ones, or just those if `prefill` is more. The engine must be at rest; its
    caches hold nothing of use afterwards. Raises FirstlightError if the step fits neither the caches nor the buckets.
    """
    executor = engine.executor
    if not isinstance(executor, Executor):
        raise FirstlightError("profile: one rank only; run without --tensor-parallel")
    with torch.inference_mode(), torch.cuda.stream(executor.stream) if executor.stream else nullcontext():
        return _profile(executor, _host_step(engine, executor, batch, context, prefill), context)


def _host_step(engine: Engine, executor: Executor, batch: int, context: int, prefill: int) -> HostStep:
    """The step, with its rows of the request table, pages and slots in place."""
    rows = batch + bool(prefill)
    if rows == 0:
        raise FirstlightError("profile: an empty step; give --batch or --prefill")
    longest = max(context, prefill)
    largest = executor.loaded.buckets[-1]
    step = "--step-tokens, and --max-running times --max-context, which no step has more tokens than"
    limits = {
        "--batch": (rows, len(executor.table.length) - 1, "--max-running"),
        "--prefill": (prefill, largest.query, step),
        "--batch and --prefill": (batch + prefill, largest.tokens, step),
        "--context": (longest, executor.loaded.max_context, "--max-context"),
    }
    for name, (asked, most, option) in limits.items():
        if asked > most:
            raise FirstlightError(f"profile: {name} needs {asked:,} and there are {most:,}; see {option}")
    if not prefill:
        return place_step(executor, decode=batch, context=context)
    return place_step(executor, decode=batch, context=context, prompts=1, new=prefill, before=longest - prefill)


def _profile(executor: Executor, step: HostStep, context: int) -> Profile:
    loaded = executor.loaded
    graphs = executor.graphs
    # The padded step that is served, where there is a graph of it.
    run, bucket = step_runner(executor, step, graphs.find(step) if graphs is not None else None)
    modules = {"requests": loaded.requests, "model": loaded.model, "sampler": loaded.sampler}
    run()  # compiles
    calls: dict[tuple[Any, ...], list[Callable[[], Any]]] = {}
    first: dict[tuple[Any, ...], tuple[Bound, tuple[Any, ...], Mapping[str, Any]]] = {}

    def observe(bound: Bound, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key = (bound.op.name, across_layers(bound.path), specs((args, kwargs)))
        first.setdefault(key, (bound, args, kwargs))
        calls.setdefault(key, []).append(partial(bound.run, *args, **kwargs))
        return bound.run(*args, **kwargs)

    with ExitStack() as stack:
        for module in modules.values():
            stack.enter_context(observed(module, observe))
        run()
    choices = {
        path: site.choices[bucket.index]
        for module in modules.values()
        for path, site in sites(module)
        if site.choices  # what a step never calls (a vision tower) is bound apart
    }
    shape = _shape(loaded.model.config, step, context)
    lines = []
    for key, made in calls.items():
        bound, args, kwargs = first[key]
        seconds, launch_bound = _time(made, loaded.device)
        floor = _floor(bound, shape, args, kwargs, loaded.hardware)
        choice = choices[bound.path]
        refused = tuple((name, reason) for name, reason in choice.refused if name != "*")
        lines.append(Line(key[0], key[1], len(made), seconds, floor, _provider(choice), refused, launch_bound))
    whole, launch_bound = _time([run], loaded.device)
    return Profile(lines, whole, loaded.device.type == "cuda" and not launch_bound, bucket, step.tokens)


def _time(calls: list[Callable[[], Any]], device: torch.device) -> tuple[float, bool]:
    """Seconds of one call, and whether launches are in it because no graph could hold it."""
    try:
        return seconds_of(calls, device), False
    except CaptureError:
        return sum(once(call, device) for call in calls) / len(calls), True


def _provider(choice: Choice) -> str:
    return " + ".join(_provider(part) for part in choice.parts) if choice.parts else choice.provider


def _shape(config: Any, step: HostStep, context: int) -> Shape:
    tokens, requests = step.tokens, len(step.rows)
    prefill = tokens - step.decodes
    before = step.context - prefill
    pairs = step.decodes * context + (prefill * before + prefill * (prefill + 1) / 2 if prefill else 0)
    experts = getattr(config, "num_experts", 0) or 0
    share = float(distinct_experts(experts, config.num_experts_per_tok, np.asarray(float(tokens)))) if experts else 1.0
    keys = step.decodes * context + (step.context if prefill else 0)
    return Shape(tokens, requests, keys, pairs, share)


def _floor(bound: Bound, shape: Shape, args: tuple[Any, ...], kwargs: Mapping[str, Any], hardware: Hardware) -> float:
    if not hardware.bandwidth:
        return 0.0
    meta = {name: without_data(value) for name, value in kwargs.items()}
    cost = bound.op.cost(shape, *(without_data(value) for value in args), **meta)
    widest = hardware.peak.get("bfloat16", 0.0)
    operations = sum(count / peak for dtype, count in cost.flops.items() if (peak := hardware.peak.get(dtype, widest)))
    return max((cost.read + cost.written) / hardware.bandwidth, operations)
