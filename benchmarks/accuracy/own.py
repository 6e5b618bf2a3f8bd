"""Our own step times on an H200: predicted, written down, and only then measured.

    python -m benchmarks.accuracy.own predict            # writes h200_own_predictions.json; commit it
    python -m benchmarks.accuracy.own measure            # on the GPU: writes h200_own_measured.json
    python -m benchmarks.accuracy.own compare            # the table with errors; exit 1 above 5 % on average

The model is Qwen3.5-35B-A3B with FP8 weights in blocks, random ones, as the engine binds it on an H200. A step is what one CUDA
graph holds: its inputs, the forward and greedy sampling; caches hold normal numbers. Predictions read kernels' times from
`firstlight calibrate` of the same GPU, and no time of a step. They expect tokens to meet as many experts as under uniform
routing: a step counts if its tokens did, within 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.config import EngineOptions
from firstlight.hardware import GPUS
from firstlight.hardware.calibration import Table, packaged_table, read_table
from firstlight.predict import constants
from firstlight.predict.layout import Layout, build, step_model
from firstlight.predict.shape import StepShape, distinct_experts
from firstlight.predict.step_time import Conditions
from firstlight.step import Bucket

HERE = Path(__file__).parent
PREDICTIONS, MEASURED = HERE / "h200_own_predictions.json", HERE / "h200_own_measured.json"
CONFIG = HERE / "configs" / "qwen3_5_35b_a3b_fp8.json"
BAR, DRIFT = 0.05, 0.05
OVERRIDES: tuple[str, ...] = ()
MAX_CONTEXT, MAX_ROWS, STEP_TOKENS, CACHE_GIB = 36864, 256, 8192, 84


@dataclass(frozen=True, slots=True)
class Own:
    """`decode` requests at `context` tokens each, and `prompts` of `new` tokens each behind `before` that are cached."""

    decode: int = 0
    context: int = 0
    prompts: int = 0
    new: int = 0
    before: int = 0

    @property
    def shape(self) -> StepShape:
        """As prediction sees it."""
        found = StepShape.of_decode(self.decode, self.context) if self.decode else StepShape()
        return found + StepShape.of_prefill(self.prompts, self.new, self.before) if self.prompts else found

    @property
    def rows(self) -> int:
        """Requests in the step."""
        return self.decode + self.prompts

    @property
    def tokens(self) -> int:
        """New tokens of the step."""
        return self.decode + self.prompts * self.new

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(self.context if self.decode else 0, self.new + self.before)


STEPS = (
    Own(1, 1024), Own(1, 4096), Own(1, 32768), Own(2, 4096), Own(4, 8192), Own(8, 4096), Own(8, 32768), Own(16, 2048),
    Own(32, 4096), Own(32, 16384), Own(64, 8192), Own(128, 1024), Own(256, 4096),
    Own(prompts=1, new=512), Own(prompts=1, new=2048), Own(prompts=1, new=8192), Own(prompts=8, new=1024),
    Own(prompts=1, new=2048, before=32768),
    Own(8, 4096, 1, 512), Own(64, 4096, 1, 2048),
)  # fmt: skip
"""Decode, prompts, a chunk behind a long prefix, and both in one step."""
SMALL_OPS = 4
"""Kernels of a step outside the model: its inputs, the draw (two), and what it leaves in the table of requests."""


def options() -> EngineOptions:
    """What the engine is started with."""
    return EngineOptions(
        model=str(CONFIG), weights="random", device="cuda", max_context=MAX_CONTEXT, max_running=MAX_ROWS,
        step_tokens=STEP_TOKENS, prefix_cache=False, cache_gib=CACHE_GIB, op=OVERRIDES,
    )  # fmt: skip


def predict(table: Table | None) -> dict[str, Any]:
    """Every shape, each bound in the bucket that the engine takes for it. table: of `firstlight calibrate`."""
    from firstlight.models.buckets import bucket_ladder

    hardware, layout, config = GPUS["h200"], Layout(), json.loads(CONFIG.read_text())
    buckets = bucket_ladder(options(), MAX_CONTEXT, hardware)
    model = build(config, layout)
    vocabulary = model.config.vocab_size
    priced, steps = {}, []
    for step in STEPS:
        needed = Bucket(0, step.tokens, step.rows, step.new if step.prompts else 1, step.longest, step.rows)
        bucket = next(bucket for bucket in buckets if bucket.holds(needed))
        if bucket.index not in priced:
            priced[bucket.index] = step_model(
                model, hardware, layout, Conditions(tuned=False), bucket=bucket, table=table, overrides=OVERRIDES
            )
        priced_step = priced[bucket.index].time(step.shape)
        # A graph of the step has no host in it; greedy sampling reads the logits, which are in bfloat16.
        drawn = step.rows * vocabulary * 2 / hardware.bandwidth / constants.STREAM_BANDWIDTH
        beside = SMALL_OPS * constants.SMALL_KERNEL + drawn - float(priced_step.overhead[0])
        times = (priced_step.seconds, priced_step.low, priced_step.high)
        ms, low, high = (round((float(value[0]) + beside) * 1e3, 4) for value in times)
        share = round(priced[bucket.index].calibrated_share(step.shape), 3)
        met = float(distinct_experts(model.config.num_experts, model.config.num_experts_per_tok, np.array(step.tokens)))
        row = {"ms": ms, "low_ms": low, "high_ms": high, "experts": round(met, 4), "calibrated": share}
        steps.append({**asdict(step), **row})
    about = "none: kernels are priced as a tuned engine's" if table is None else Path(table.path).name
    return {"gpu": "h200", "model": CONFIG.stem, "table": about, "overrides": OVERRIDES, "steps": steps}


def measure(engine: Any, steps: Sequence[Own] = STEPS) -> list[dict[str, Any]]:
    """Every step on the device of an engine that is at rest, in a graph where there are graphs."""
    import torch

    from firstlight.calibrate.engine_step import place_step, step_runner
    from firstlight.calibrate.timing import seconds_of

    executor = engine.executor
    device = executor.loaded.device
    for views in executor.pool.views.values():
        for view in views.values():
            view.normal_().mul_(0.3)
    rows = []
    with torch.inference_mode(), torch.cuda.stream(executor.stream) if executor.stream else nullcontext():
        for step in steps:
            run, _ = step_runner(executor, place_step(executor, **asdict(step)))
            run()  # compiles
            if device.type == "cuda":
                torch.cuda.synchronize()
            row = {**asdict(step), "ms": round(seconds_of([run], device) * 1e3, 4)}
            rows.append(row | {"experts": _experts_met(executor.loaded.model, run)})
            print(rows[-1], flush=True)
    return rows


def _experts_met(model: Any, run: Callable[[], None]) -> float:
    """Share of a layer's experts that the step's tokens were routed to, on average."""
    from firstlight.ops.observe import Bound, observed

    shares: list[float] = []

    def observe(bound: Bound, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if bound.op.name == "moe":
            chosen = (args[0] @ args[1].t()).topk(kwargs["top_k"], dim=-1).indices
            shares.append(chosen.unique().numel() / args[1].shape[0])
        return bound.run(*args, **kwargs)

    with observed(model, observe):
        run()
    return round(sum(shares) / max(len(shares), 1), 4)


def compare(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> float:
    """Print every step that was measured, and return the mean of the errors' sizes."""
    times = {_key(step): step for step in measured["steps"]}
    errors, inside = [], []
    print(f"{'step':50} {'measured':>9} {'predicted':>9} {'80 % interval':>17} {'error':>7}   ms")
    for step in predicted["steps"]:
        if _key(step) not in times:
            continue
        real, met = (times[_key(step)][name] for name in ("ms", "experts"))
        if abs(met / step["experts"] - 1) > DRIFT:
            print(
                f"{_name(step):50} {real:9.3f} doesn't count: {met:.0%} of the experts met, not {step['experts']:.0%}"
            )
            continue
        errors.append(step["ms"] / real - 1)
        inside.append(step["low_ms"] <= real <= step["high_ms"])
        interval = f"{step['low_ms']:.3f}-{step['high_ms']:.3f}"
        print(f"{_name(step):50} {real:9.3f} {step['ms']:9.3f} {interval:>17} {errors[-1]:+7.1%}")
    if not errors:
        raise SystemExit("no step was both predicted and measured")
    mean = sum(map(abs, errors)) / len(errors)
    print(
        f"{len(errors)} steps: mean error {mean:.1%}, worst {max(map(abs, errors)):.1%}, {sum(inside)} in their intervals"
    )
    return mean


def _name(step: Mapping[str, Any]) -> str:
    decode = [f"{step['decode']} x {step['context']}"] if step["decode"] else []
    behind = f" behind {step['before']}" if step["before"] else ""
    return " + ".join(decode + ([f"{step['prompts']} prompt x {step['new']}{behind}"] if step["prompts"] else []))


def _key(step: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(step[name] for name in ("decode", "context", "prompts", "new", "before"))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "compare"))
    parser.add_argument("--table", type=Path, help="of `firstlight calibrate`; the packaged one if not given")
    parser.add_argument("--out", type=Path, help="where to write, or what to compare with")
    arguments = parser.parse_args()
    if arguments.what == "compare":
        found = arguments.out or MEASURED
        return int(compare(json.loads(PREDICTIONS.read_text()), json.loads(found.read_text())) > BAR)
    if arguments.what == "measure":
        import torch

        from firstlight.engine.engine import Engine

        engine = Engine(options())
        result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": measure(engine)}
        target = arguments.out or MEASURED
        engine.close()
    else:
        table = read_table(arguments.table) if arguments.table else packaged_table(GPUS["h200"])
        result, target = predict(table), arguments.out or PREDICTIONS
        for step in result["steps"]:
            print(step)
    target.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
