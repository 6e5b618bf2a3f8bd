"""Decode steps and first tokens of a model on one GPU, through the engine: scheduler, graphs and sampler included.

    python benchmarks/h200.py tests/configs/Qwen3.5-35B-A3B-FP8.json --json h200.json

The weights are random, in the format that the config states, and made on the device; so are the prompts. For each batch
size B, B prompts of `--context` tokens are answered with 8 and with 136 tokens; a decode step is the difference divided by
128. "steady" is the median step, and "graph" the captured forward alone, while all B decode. Tokens are drawn at temperature
1, each request with its own seed: greedily, random weights lead all requests to the same few tokens, and so to the same
experts. A row counts only if tokens are routed to as many experts as uniform routing gives, E (1 - (1 - k/E)^B), within 5 %;
without graphs they aren't counted. First tokens: one prompt alone, from `add` to its first token, the median of five.

Parts of the engine can be turned off or replaced, to see what they give; `benchmarks/paths.py` does that for all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firstlight.config import EngineOptions
from firstlight.engine.engine import Engine
from firstlight.engine.executor import Executor
from firstlight.errors import FirstlightError
from firstlight.ops.observe import Bound, observed
from firstlight.ops.op import REGISTRY, sites
from firstlight.ops.route import route
from firstlight.scheduling.request import Request
from firstlight.scheduling.sampling import SamplingParams, ServiceClass

SHORT, LONG = 8, 136
STEADY = 32
"""Steps in which all requests decode, at least."""
DRIFT = 0.05


class Driver:
    """Runs closed batches of random prompts on an engine."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.generator, self.number = engine, np.random.default_rng(seed), 0

    def run(
        self, batch: int, prompt: int, new: int, probe: Callable[[], None] | None = None
    ) -> tuple[float, list[float]]:
        """Seconds from the first `add` to the last token of `batch` requests, and of each step in which all of them decoded.

        probe: called once, between two such steps.
        """
        requests = []
        for _ in range(batch):
            sampling = SamplingParams(temperature=1.0, seed=self.number, max_tokens=new)
            ids = self.generator.integers(1000, self.engine.vocab_size - 1000, prompt).astype(np.int32)
            requests.append(Request(f"b{self.number}", ids, sampling, ServiceClass.ONLINE))
            self.number += 1
        torch.cuda.synchronize()
        start = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        counts: dict[str, int] = {}
        steady: list[float] = []
        before, all_before = start, False
        while self.engine.has_work():
            deltas = self.engine.step()
            for delta in deltas:
                counts[delta.id] = counts.get(delta.id, 0) + len(delta.tokens)
            now = time.perf_counter()
            everyone = len(deltas) == batch and max(counts.values()) < new
            if everyone and all_before:
                steady.append(now - before)
                if probe is not None:
                    probe()
                    probe, now = None, time.perf_counter()
            before, all_before = now, everyone
        elapsed = time.perf_counter() - start
        if sorted(counts.values()) != [new] * batch:
            raise SystemExit(f"{batch} requests of {new} tokens gave {sorted(counts.values())}")
        return elapsed, steady


def graph_milliseconds(executor: Executor, batch: int, repeats: int = 20) -> float | None:
    """The captured forward of this batch size alone, at the rows and lengths of its last replay. States go on changing."""
    if executor.graphs is None:
        return None
    graph = next((graph for graph in executor.graphs.graphs if graph.room.decodes >= batch), None)
    if graph is None or executor.stream is None:
        return None
    with torch.cuda.stream(executor.stream):
        graph.forward.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            graph.forward.replay()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / repeats


def distinct_experts(executor: Executor, batch: int) -> list[int]:
    """Experts that the tokens of the last replayed step were routed to, by layer with experts."""
    if executor.graphs is None or executor.stream is None:
        return []
    graph = next(graph for graph in executor.graphs.graphs if graph.room.decodes >= batch)
    counts: list[int] = []

    def observe(bound: Bound, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if bound.op.name == "moe":
            chosen = route(
                args[0][:batch] @ args[1].t(),
                top_k=kwargs["top_k"],
                scoring=kwargs["scoring"],
                renormalise=kwargs["renormalise"],
            )[1]
            counts.append(int(chosen.unique().numel()))
        return bound.run(*args, **kwargs)

    with torch.inference_mode(), torch.cuda.stream(executor.stream), observed(executor.loaded.model, observe):
        step, _, _ = executor.graphs.step_of(graph.memory, graph.room)
        executor.loaded.model(step)
    return counts


def prompt_steps(batch: int, context: int, step_tokens: int) -> int:
    """Steps until the last of `batch` prompts is in: the first ones decode meanwhile."""
    return -(-batch * (context + 1) // step_tokens) + 1


def decode_row(driver: Driver, executor: Executor, batch: int, context: int, rounds: int) -> dict[str, Any]:
    """One row of the table of decode steps; times in milliseconds."""
    seen: list[int] = []
    graph: list[float | None] = []

    def probe() -> None:
        torch.cuda.synchronize()
        seen.extend(distinct_experts(executor, batch))
        graph.append(graph_milliseconds(executor, batch))

    together = SHORT + STEADY + prompt_steps(batch, context, executor.loaded.options.step_tokens)
    _, steady = driver.run(batch, context, together, probe)
    steps = []
    for _ in range(rounds):
        short, _ = driver.run(batch, context, SHORT)
        steps.append((driver.run(batch, context, LONG)[0] - short) / (LONG - SHORT) * 1e3)
    config = executor.loaded.model.config
    row: dict[str, Any] = {"batch": batch, "step_ms": statistics.median(steps) if steps else None, "steps_ms": steps}
    row["steady_ms"] = statistics.median(steady) * 1e3 if steady else None
    row["graph_ms"] = graph[0] if graph else None
    experts = getattr(config, "num_experts", 0)
    if experts:
        uniform = experts * (1 - (1 - config.num_experts_per_tok / experts) ** batch)
        row["experts"] = statistics.mean(seen) if seen else None
        row["experts_uniform"] = uniform
        row["counts"] = abs(row["experts"] / uniform - 1) <= DRIFT if seen else None
    return row


def take_out(name: str) -> None:
    """Forget a provider, `OP=PROVIDER`, so that the next best takes its place everywhere. Raises SystemExit if it isn't there."""
    op, _, provider = name.partition("=")
    if op not in REGISTRY or provider not in REGISTRY[op].providers:
        known = ", ".join(REGISTRY[op].providers) if op in REGISTRY else f"no op; ops: {', '.join(sorted(REGISTRY))}"
        raise SystemExit(f"--without {name}: expected OP=PROVIDER; {op} has {known}")
    del REGISTRY[op].providers[provider]


def launch_independently() -> None:
    """Let each kernel begin when the one before it has ended, as if the GPU had no programmatic dependent launch."""
    from firstlight.ops import triton_launch

    triton_launch._options_on = lambda device: {"PDL": False}  # type: ignore[assignment]


def hand_over_plain() -> None:
    """Let every op give plain results, as if none could pack them for its readers."""
    from firstlight.ops import binding

    binding.hand_over = lambda binder, bound: None


def providers_of(executor: Executor) -> dict[str, list[str]]:
    """Who computes each op, by `op` or `op.site`; several, where buckets or layers differ."""
    found: dict[str, set[str]] = {}
    loaded = executor.loaded
    for module in (loaded.requests, loaded.model, loaded.sampler):
        for _, site in sites(module):
            name = f"{site.op.name}.{site.label}" if site.label else site.op.name
            for choice in site.choices:
                if not any(refused == "*" for refused, _ in choice.refused):  # called in this bucket
                    found.setdefault(name, set()).add(choice.provider)
    return {name: sorted(providers) for name, providers in found.items()}


def commit() -> str:
    """The commit that is measured, marked if the tree differs from it."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def arguments_parser() -> argparse.ArgumentParser:
    """What can be asked for; `benchmarks/paths.py` asks in the same words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="config.json, or a directory with one")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128, 256])
    parser.add_argument("--max-running", type=int, default=0, help="default: the largest batch")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[8192], help="lengths of the prompts for first tokens"
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each such prompt")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of the difference; 0: the steady step and the graph alone"
    )
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--cache-gib", type=float, default=0.0)
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument(
        "--without", action="append", default=[], metavar="OP=PROVIDER", help="as if this provider didn't exist"
    )
    parser.add_argument("--no-dependent-launches", dest="dependent_launches", action="store_false")
    parser.add_argument(
        "--no-handover", dest="handover", action="store_false", help="each FP8 product packs its input itself"
    )
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    parser.add_argument("--page-size", type=int, help="default: the engine's own for a GPU")
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--state-dtype", default="auto")
    parser.add_argument("--table", default="auto", help="`none`: providers by rank, not by measured times")
    parser.add_argument("--commit", help="what is measured; default: git's description of this tree")
    parser.add_argument("--json", type=Path)
    return parser


def options_of(arguments: argparse.Namespace) -> EngineOptions:
    """The engine that is asked for. Raises ValidationError for a value that it doesn't have."""
    waiting = prompt_steps(max(arguments.batch, default=1), arguments.context, arguments.step_tokens)
    longest = max(LONG, SHORT + STEADY + waiting)
    given: dict[str, Any] = {} if arguments.page_size is None else {"page_size": arguments.page_size}
    return EngineOptions(
        model=arguments.model,
        weights="random",
        device="cuda",
        max_context=max([arguments.context + longest, *[p + 1 for p in arguments.prompts]]),
        max_running=max([arguments.max_running, *arguments.batch]) or 1,
        step_tokens=arguments.step_tokens,
        prefix_cache=False,
        cache_gib=arguments.cache_gib,
        op=tuple(arguments.op),
        graphs=arguments.graphs,
        depth=arguments.depth,
        kv_dtype=arguments.kv_dtype,
        state_dtype=arguments.state_dtype,
        table=arguments.table,
        **given,
    )


def main(given: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = arguments_parser().parse_args(given)
    for name in arguments.without:
        take_out(name)
    if not arguments.dependent_launches:
        launch_independently()
    if not arguments.handover:
        hand_over_plain()
    start = time.perf_counter()
    try:
        engine = Engine(options_of(arguments))
    except FirstlightError as error:
        raise SystemExit(str(error)) from None
    ready = time.perf_counter() - start
    executor = engine.executor
    assert isinstance(executor, Executor)
    print(f"ready after {ready:.1f} s; {engine.facts['cache']}; {engine.facts.get('state', '')}", flush=True)
    result: dict[str, Any] = {
        "model": Path(arguments.model).name, "commit": arguments.commit or commit(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "context": arguments.context, "ready_s": ready, "decode": [], "first_token": [], "providers": providers_of(executor),
    }  # fmt: skip

    def write() -> None:  # after every row: what is measured stays, whatever comes next
        if arguments.json:
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            result["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
            unfinished = arguments.json.with_suffix(".part")
            unfinished.write_text(json.dumps(result, indent=1))
            unfinished.replace(arguments.json)

    driver = Driver(engine, seed=0)
    for length in arguments.prompts:
        driver.run(1, length, 1)
        times = sorted(driver.run(1, length, 1)[0] * 1e3 for _ in range(arguments.repeats))
        result["first_token"].append({"prompt": length, "ms": statistics.median(times), "all_ms": times})
        write()
        print(
            f"first token of {length:6}: {statistics.median(times):8.1f} ms  {[round(t, 1) for t in times]}", flush=True
        )
    for batch in arguments.batch:
        row = decode_row(driver, executor, batch, arguments.context, arguments.rounds)
        result["decode"].append(row)
        write()
        print(
            f"decode B={batch:4}: step {row['step_ms'] or float('nan'):7.3f} ms, steady "
            f"{row['steady_ms'] or float('nan'):7.3f} ms, graph {row['graph_ms'] or float('nan'):7.3f} ms"
            + (f", experts {row['experts']:.1f} of {row['experts_uniform']:.1f}" if row.get("experts") else "")
            + f"  {[round(s, 3) for s in row['steps_ms']]}",
            flush=True,
        )
    write()
    engine.close()
    if any(row.get("counts") is False for row in result["decode"]):
        print("some rows don't count: the routing is not uniform", file=sys.stderr)


if __name__ == "__main__":
    main()
