"""Predict every published point exactly as it was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from firstlight.predict.layout import Layout, build, gpu_of, step_model
from firstlight.predict.shape import StepShape
from firstlight.predict.step_time import Conditions, StepModel, StepTime

HERE = Path(__file__).parent
SERVING = "serving"
DRAWN = 0.9
"""Of the nominal lengths of served requests, on average: they are drawn from 0.8 to 1 times those."""
SERVED_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Result:
    """A point in tokens/s/GPU. group: the set that it belongs to. low, high: the prediction's 80 %
    interval. error: predicted over measured, minus 1."""

    group: str
    name: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.measured - 1


@lru_cache(maxsize=1)
def published() -> Mapping[str, Any]:
    """The points with their sources and workloads."""
    content: dict[str, Any] = json.loads((HERE / "published.json").read_text())
    return content


@lru_cache(maxsize=1)
def served() -> Mapping[str, Any]:
    """Served measurements, a row each; see the file's "axes"."""
    content: dict[str, Any] = json.loads((HERE / "serving.json").read_text())
    return content


def committed_means() -> Mapping[str, float]:
    """The mean error of each set that must not get worse."""
    means: Mapping[str, float] = published()["committed_mean_error"]
    return means


@cache
def _priced(config: str, gpu: str, layout: Layout, conditions: Conditions) -> StepModel:
    raw = json.loads((HERE / "configs" / f"{config}.json").read_text())
    return step_model(build(raw, layout), gpu_of(gpu), layout, conditions)


def priced(point: Mapping[str, Any]) -> StepModel:
    """The model of a point, on its GPUs, under its conditions."""
    layout = Layout(
        tensor_parallel=point.get("tp", 1),
        data_parallel=point.get("dp", 1),
        expert_parallel=point.get("ep", 1),
        float8_weights=point.get("float8_weights", False),
    )
    conditions = Conditions(
        graph=not point.get("eager", False), two_batch_overlap=point.get("two_batch_overlap", False)
    )
    return _priced(point["config"], point["gpu"], layout, conditions)


def predict(point: Mapping[str, Any]) -> Result:
    """Price the step of a point."""
    if point["phase"] == "prefill":
        shape = StepShape.of_prefill(point["tokens"] / point["prompt"], point["prompt"])
        tokens = point["tokens"]
    else:
        shape = StepShape.of_decode(point["requests"], point["context"])
        tokens = point["requests"]
    model = priced(point)
    step = model.time(shape)
    tokens /= model.mesh.tp.size  # a step's tokens are those of one attention replica
    return Result(
        point["set"],
        point["name"],
        point["measured"],
        tokens / float(step.seconds[0]),
        tokens / float(step.high[0]),
        tokens / float(step.low[0]),
    )


def predict_served(row: Sequence[Any]) -> Result:
    """Price a request's mean time between tokens among others that come and go.

    While it generates n tokens, every other request is admitted once: their prompts' steps come between its own.
    """
    config, gpu, engine, ranks, requests, milliseconds = row
    float8 = config in ("llama_3_1_70b", "qwen3_5_397b_a17b")  # others state their formats
    model = _priced(config, gpu, Layout(tensor_parallel=ranks, float8_weights=float8), Conditions())
    length = DRAWN * SERVED_LENGTH
    decode = model.time(StepShape.of_decode(requests, 1.5 * length))
    prefill = model.time(StepShape.of_prefill(1, length))

    def rate(name: str) -> float:
        def of(step: StepTime) -> float:
            return float(getattr(step, name)[0])

        return requests / ranks / (of(decode) + (requests - 1) * of(prefill) / length)

    name = f"{config}, {ranks} x {gpu}, {requests}, {engine}"
    measured = requests / ranks / milliseconds * 1e3
    return Result(SERVING, name, measured, rate("seconds"), rate("high"), rate("low"))


def compare() -> list[Result]:
    """Every published point."""
    return [*map(predict, published()["points"]), *map(predict_served, served()["rows"])]


def mean_errors(results: Sequence[Result]) -> dict[str, float]:
    """Mean of the errors' sizes, for each set."""
    groups: dict[str, list[float]] = {}
    for result in results:
        groups.setdefault(result.group, []).append(abs(result.error))
    return {group: sum(sizes) / len(sizes) for group, sizes in groups.items()}
