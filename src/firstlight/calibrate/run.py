"""From options to a table: load, sweep, and put results in the form that `hardware.calibration` reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from time import perf_counter
from typing import Any

import torch

from firstlight.calibrate.sweep import Result, Scratch, Sweep
from firstlight.calibrate.timing import copy_bandwidth
from firstlight.calibrate.workload import StepShape, Workload, step_shapes
from firstlight.config import EngineOptions
from firstlight.engine.loading import bind_only, refuse_missing_weights
from firstlight.errors import FirstlightError
from firstlight.hardware.calibration import table_name
from firstlight.models.buckets import resolve_options
from firstlight.quant import dtype_name
from firstlight.weights.location import model_name

Progress = Callable[[str], None]
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


@dataclass(frozen=True, slots=True)
class Calibration:
    """table: the content of a table's file. results: of every provider at every call. scratch: providers that took more
    scratch memory than they declare, by (op, provider). left_out: steps that would have begun too late."""

    table: Mapping[str, Any]
    results: Sequence[Result]
    scratch: Mapping[tuple[str, str], Scratch]
    left_out: Sequence[StepShape] = ()


@torch.inference_mode()
def calibrate(
    options: EngineOptions,
    only: Iterable[str] = (),
    seconds: float = 300.0,
    progress: Progress = lambda text: None,
) -> Calibration:
    """Measure on the device of the options.

    only: ops to measure; empty: all that the model calls. seconds: steps that would begin later are left out.
    Raises FirstlightError or ValueError, with a message for people.
    """
    if options.tensor_parallel > 1:
        raise FirstlightError("calibrate measures on one rank; run it without --tensor-parallel")
    begin = perf_counter()
    progress(f"loading one layer of each kind, {weights_of(options)}")
    # Binding is what this makes a table for: one small bucket is enough to describe the model.
    bound = bind_only(options.model_copy(update={"max_running": 1, "step_tokens": 1, "table": "none"}))
    options = resolve_options(options, bound.hardware)
    refuse_missing_weights(options, bound.checkpoint)
    if options.threads and bound.device.type == "cpu":
        torch.set_num_threads(options.threads)
    workload = Workload(
        bound,
        max_rows=options.max_running,
        page_size=options.page_size,
        cache_bytes=int(options.cache_gib * (1 << 30)),
        seed=options.seed,
    )
    sweep = Sweep(workload, bound.hardware, frozenset(only))
    shapes = step_shapes(
        workload.rows, options.step_tokens, bound.max_context, workload.cached_tokens, options.page_size
    )
    left_out = []
    for number, shape in enumerate(shapes):
        if perf_counter() - begin > seconds:
            left_out.append(shape)
            continue
        where = f"step {number + 1} of {len(shapes)}: {shape}"
        step = workload.step(shape)
        if bound.device.type == "cuda":
            progress(f"{where}: compiling")
            sweep.warm_up(step)
        workload.fill_caches()
        progress(f"{where}: measuring")
        sweep.measure(step)
    bandwidth = copy_bandwidth(bound.device, COPY_BYTES.get(bound.device.type, 1 << 30))
    where = (
        "inside a CUDA graph, weights and caches rotated past the L2 cache"
        if bound.hardware.l2
        else "by repeated calls"
    )
    dtype = dtype_name(bound.dtype)
    header: dict[str, Any] = {
        "gpu": table_name(bound.hardware),
        "source": f"firstlight calibrate {model_name(options.model)}, {where}",
        "versions": versions(bound.device),
        "dtype": dtype,
        "page_size": options.page_size,
        "copy_tb_s": round(bandwidth / 1e12, 3),
    }
    return Calibration({**header, "groups": groups_of(sweep.results, dtype)}, sweep.results, sweep.scratch, left_out)


def weights_of(options: EngineOptions) -> str:
    """What a calibration computes with, for people."""
    return f"random weights of seed {options.seed}" if options.weights == "random" else "the checkpoint's weights"


def versions(device: torch.device) -> dict[str, str]:
    """The software that times depend on."""
    found: dict[str, str] = {"torch": str(torch.__version__)}
    with contextlib.suppress(metadata.PackageNotFoundError):  # run from a source tree that isn't installed
        found["firstlight"] = metadata.version("firstlight")
    if device.type == "cuda":
        import triton

        found["triton"] = triton.__version__
        found["hip" if torch.version.hip else "cuda"] = str(torch.version.hip or torch.version.cuda)
    return found


def groups_of(results: Iterable[Result], dtype: str) -> list[dict[str, Any]]:
    """Results in the table's form: a group for each op, provider and fixed sizes. dtype: what groups have unless they say."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in results:
        sizes = result.sizes
        fixed, axes = dict(sorted(sizes.fixed.items())), list(sizes.step)
        key = (result.op, result.label, sizes.format, sizes.dtype, *fixed.items(), result.provider)
        if key not in groups:
            group: dict[str, Any] = {"op": result.op}
            groups[key] = group
            if result.label:
                group["label"] = result.label
            group.update({"provider": result.provider, "format": sizes.format})
            if sizes.dtype != dtype:
                group["dtype"] = sizes.dtype
            group.update({"fixed": fixed, "axes": axes, "rows": []})
        where = list(sizes.step.values())
        if result.reason:
            groups[key].setdefault("refused", []).append([*where, result.reason])
        else:
            groups[key]["rows"].append([*where, float(f"{result.seconds * 1e6:.4g}")])
    for made in groups.values():
        made["rows"].sort()
    return [groups[key] for key in sorted(groups, key=str)]


def table_text(table: Mapping[str, Any]) -> str:
    """JSON with a group a line, so that tables are small and their changes readable."""
    head = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items() if name != "groups")
    groups = ",\n".join(f"  {json.dumps(group)}" for group in table["groups"])
    return f'{{\n{head},\n "groups": [\n{groups}\n ]\n}}\n'
