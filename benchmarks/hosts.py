"""A model inside SGLang or vLLM, by the host's own class and by Firstlight's: decode steps and first tokens, with the same flags.

    python benchmarks/hosts.py MODEL_FOLDER --host vllm --json hosts.json

Each side is the host's offline engine in a fresh process, one after the other, with random weights (`--load-format dummy`); before
anything is timed, the host's log has to say whose class serves. For each batch size B, B random prompts of `--context` tokens
are answered with 8 and with 136 tokens; a decode step is the difference divided by 128. "Steady" is a step while B requests
decode: in vLLM the median time between two steps' tokens, in SGLang what follows from the tokens/s that it logs. A first
token is of one prompt alone, the median of five. Tokens are drawn at temperature 1: greedily, random weights lead requests to
the same few tokens, and so to the same experts.

    python benchmarks/hosts.py tests/tiny_configs/qwen3_5_moe_text.json --tokens --tp 2

draws a checkpoint for a small config.json, lets Firstlight's class answer greedily in SGLang on one rank and on `--tp` ranks,
and compares: tokens are equal, or first differ where their log probabilities on one rank are closer than `TIES`. A second round
goes on from the first one's answers, with prefixes from SGLang's cache.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from host_engines import HOSTS
from host_side import PLAIN, PLUGIN, run_side

TOKENS: dict[str, Any] = {
    "mem_fraction_static": 0.3,
    "max_total_tokens": 16384,
    "max_running_requests": 24,
    "chunked_prefill_size": 128,
    "mamba_track_interval": 64,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 24],
}
"""Of SGLang, for `--tokens`."""
TIES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""Log probabilities closer than this may be ranked either way: ranks add partial sums in another order, in this dtype."""
LENGTHS = (1, 2, 3, 7, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 200, 300)
"""Of the prompts of `--tokens`."""


def compare_speed(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Time both sides and print the table, also of what one side had when it failed. Returns what went wrong."""
    model = arguments.model
    if not model.is_dir():
        model = folder / "model"
        model.mkdir()
        shutil.copy(arguments.model, model / "config.json")
    config = json.loads((model / "config.json").read_text())
    host, ranks = HOSTS[arguments.host], arguments.tp
    flags = host.options(model, ranks) | host.timing | arguments.flag
    job = {
        "do": "time",
        "host": arguments.host,
        "flags": flags,
        "ranks": ranks,
        "vocabulary": config.get("text_config", config)["vocab_size"],
        "prompts": arguments.prompts,
        "batch": arguments.batch,
        "context": arguments.context,
        "rounds": arguments.rounds,
        "temperature": arguments.temperature,
    }
    result: dict[str, Any] = {
        "commit": commit(), "model": arguments.model.name, "context": arguments.context, "flags": flags, "sides": {},
    }  # fmt: skip
    failures = []
    for side in arguments.sides:
        found: dict[str, Any] = {"first_token": {}, "decode": {}}
        result["sides"][side] = found

        def heard(told: dict[str, Any], side: str = side, found: dict[str, Any] = found) -> None:
            take(told, found)
            print(f"{side}: {json.dumps(told)}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1))

        try:
            run_side(side, job, arguments.logs / f"{arguments.host}-{side}.log", arguments.seconds, heard)
        except SystemExit as error:  # the other side's figures are worth having all the same
            failures.append(str(error))
            print(error, file=sys.stderr, flush=True)
    print("\n" + table(result["sides"], arguments), flush=True)
    return failures


def take(told: dict[str, Any], found: dict[str, Any]) -> None:
    """Put what a side said into its part of the result, under prompt lengths and batch sizes."""
    values = {name: value for name, value in told.items() if name != "kind"}
    if told["kind"] == "first_token":
        found["first_token"][str(told["prompt"])] = values
    elif told["kind"] == "decode":
        found["decode"][str(told["batch"])] = values
    else:
        found.update(values)


def table(sides: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Both sides as Markdown; a ratio above 1 means that Firstlight is faster."""
    lines = [f"| ms | {HOSTS[arguments.host].name}'s class | Firstlight's | ratio |", "|---|---|---|---|"]

    def row(what: str, part: str, size: int, field: str) -> None:
        plain, plugin = (sides.get(side, {}).get(part, {}).get(str(size), {}).get(field) for side in (PLAIN, PLUGIN))
        ratio = f"{plain / plugin:.2f}" if plain and plugin else ""
        lines.append(f"| {what} | {' | '.join(f'{ms:.2f}' if ms else '' for ms in (plain, plugin))} | {ratio} |")

    for length in arguments.prompts:
        row(f"first token of {length}", "first_token", length, "ms")
    for name, field in (("decode step", "ms"), ("steady step", "steady_ms")):
        for batch in arguments.batch:
            row(f"{name}, {batch} requests of {arguments.context}", "decode", batch, field)
    return "\n".join(lines)


def compare_tokens(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Answers on one rank and on several, for each dtype. Returns what went wrong."""
    draw, failures, results = random.Random(0), [], []
    vocabulary = json.loads(arguments.model.read_text())["vocab_size"]
    prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in LENGTHS]
    for dtype in arguments.dtype:
        checkpoint = draw_checkpoint(arguments.model, dtype, folder / dtype)
        flags = {**TOKENS, "dtype": dtype, **arguments.flag}
        answered: dict[int, list[dict[str, Any]]] = {}
        for ranks in dict.fromkeys((1, arguments.tp)):
            given = HOSTS["sglang"].options(checkpoint, ranks) | flags
            job = {"do": "answer", "host": "sglang", "flags": given, "ranks": ranks, "prompts": prompts}
            rounds = answered[ranks] = []
            heard: Callable[[dict[str, Any]], None] = lambda told, rounds=rounds: (  # noqa: E731
                rounds.append(told) if told["kind"] == "answers" else None
            )
            log = arguments.logs / f"sglang-{dtype}-tp{ranks}.log"
            # SGLang keeps windows of convolutions in bfloat16 unless it is told otherwise.
            environment = {"SGLANG_MAMBA_CONV_DTYPE": dtype}
            if ranks > 1:  # looked at on CPUs alone, where SGLang would deal out cores by itself
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
            run_side(PLUGIN, job, log, arguments.seconds, heard, environment)
        one, several = answered[1], answered[arguments.tp]
        gaps = [gap for pair in zip(one, several, strict=True) for gap in partings(*pair)]
        parted = [gap for gap in gaps if gap is not None]
        line = (
            f"{dtype}, {arguments.tp} ranks and one: {len(gaps) - len(parted)} of {len(gaps)} answers are equal; the others "
            f"first differ at gaps of {max(parted, default=0.0):.2g} at most (tie: {TIES[dtype]}); "
            f"prompt tokens from the cache: {sum(told['cached'] for told in several)} and {sum(told['cached'] for told in one)}"
        )
        print(line, flush=True)
        results.append({"dtype": dtype, "ranks": arguments.tp, "answers": len(gaps), "gaps": parted})
        if arguments.json:
            arguments.json.write_text(json.dumps({"commit": commit(), "flags": flags, "tokens": results}, indent=1))
        if max(parted, default=0.0) > TIES[dtype]:
            failures.append(line)
    return failures


def partings(one: dict[str, Any], other: dict[str, Any]) -> list[float | None]:
    """For each answer that both gave to the same prompt: None if they are equal, else the difference in log probability, as
    the first saw it, of the tokens where they part; infinite if that of `other` wasn't among the likely ones.

    Answers to prompts that aren't the same, because earlier ones parted, aren't there.
    """
    gaps: list[float | None] = []
    for i, (mine, theirs) in enumerate(zip(one["answers"], other["answers"], strict=True)):
        if one["prompts"][i] != other["prompts"][i]:
            continue
        place = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if place is None:
            gaps.append(None)
        else:
            likely = dict(one["likely"][i][place])
            gaps.append(abs(likely[mine[place]] - likely.get(theirs[place], -math.inf)))
    return gaps


def draw_checkpoint(config_file: Path, dtype: str, folder: Path) -> Path:
    """A folder with the config, in this dtype, and random weights for it."""
    import torch
    from safetensors.torch import save_file

    from firstlight.plugin.core import describe
    from firstlight.weights.random_weights import random_tensors

    config = {**json.loads(config_file.read_text()), "dtype": dtype}
    tensors = random_tensors(describe(config, dtype=getattr(torch, dtype)), 0, "cpu")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    drawn = {name: tensor.load_slice(None).contiguous() for name, tensor in tensors.items()}
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def flag(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON if it is any, else as it stands. Raises ArgumentTypeError without a `=`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: say NAME=VALUE, with a name of the host's options (dtype=float16)")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def commit() -> str:
    """As h200.py says it."""
    import h200

    return h200.commit()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", type=Path, help="folder that the host can start from without weights, or a config.json"
    )
    parser.add_argument("--host", default="sglang", choices=list(HOSTS))
    parser.add_argument("--sides", nargs="*", default=[PLAIN, PLUGIN], choices=[PLAIN, PLUGIN])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[8192], help="lengths of the prompts for first tokens"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of a batch whose prompts have 2^18 tokens at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tp", type=int, default=1, help="ranks")
    parser.add_argument("--tokens", action="store_true", help="compare SGLang's answers on one rank and on --tp")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"], choices=list(TIES), help="of --tokens")
    parser.add_argument(
        "--flag", type=flag, action="append", default=[], help="NAME=VALUE for the host, over those here"
    )
    parser.add_argument(
        "--seconds", type=float, default=1800.0, help="for each start of the host, with what is run in it"
    )
    parser.add_argument("--logs", type=Path, default=Path(), help="folder for the host's logs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.flag = dict(arguments.flag)
    if arguments.tokens and arguments.host != "sglang":
        parser.error("--tokens compares answers inside SGLang alone")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the side is ended as well
    with tempfile.TemporaryDirectory() as folder:
        failures = (compare_tokens if arguments.tokens else compare_speed)(arguments, Path(folder))
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
