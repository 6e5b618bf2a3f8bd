"""What each path gives: one thing at a time is turned off, or on if it changes answers, and the engine is measured again.

    PYTHONPATH=src python benchmarks/paths.py tests/configs/Qwen3.5-35B-A3B-FP8.json --json paths.json

Each variant is a process of `benchmarks/h200.py` on one GPU, and all visible GPUs work side by side: the first token of one prompt
alone, and for each number of requests the median step while all of them decode; `!` marks a step that doesn't count, since its tokens
went to fewer experts than they should (see `benchmarks/h200.py`). Each GPU first measures everything as it is, against
which its variants are compared, and again at the end if time is left: the second shows how far two equal runs are apart. A
variant that can't be had says why. Rows are printed and written as they come, so a run that is cut keeps what it has.

Where kernels haven't been compiled before, compiling them takes minutes of the time: run `benchmarks/h200.py` once first, or raise
`--limit` and `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).parent / "h200.py"
BATCHES, PROMPT = (1, 8, 32, 128), 8192
LAST_LINES = 40
"""Of what a process has said, searched for why it ended."""


@dataclass(frozen=True)
class Variant:
    """name: what differs from everything as it is. arguments: of `h200.py`. batches: numbers of requests, fewer where they would take
    too long."""

    name: str
    arguments: tuple[str, ...] = ()
    batches: tuple[int, ...] = BATCHES


def op(*texts: str) -> tuple[str, ...]:
    """Arguments that force providers."""
    return tuple(part for text in texts for part in ("--op", text))


def without(*texts: str) -> tuple[str, ...]:
    """Arguments that take providers out."""
    return tuple(part for text in texts for part in ("--without", text))


AS_IS = Variant("as is")
SMALL = (
    "sigmoid_mul=triton_fused",
    "rope_angles=triton_fused",
    "rms_norm=triton_fused",
    "embedding=triton_rows",
    "gather_rows=triton_rows",
)
VARIANTS = {
    "graphs": Variant("no CUDA graphs", ("--no-graphs",)),
    "depth": Variant("one plan in flight, not two", ("--depth", "1")),
    "dependent": Variant("no dependent launches", ("--no-dependent-launches",)),
    "handover": Variant("activations handed over plain", ("--no-handover",)),
    "pages": Variant("pages of 16 tokens, not 64", ("--page-size", "16")),
    "attention": Variant("prompts' attention in Triton", without("attention=hopper_paged")),
    "mixture-prompt": Variant(
        "prompts' mixture without Hopper's", without("moe=hopper_grouped", "experts=hopper_grouped")
    ),
    "mixture": Variant("mixture as parts", op("moe=parts")),
    "products": Variant("FP8 products in Triton alone", without("linear=torch_block_fp8")),
    "skinny": Variant("no product for one token", without("linear=triton_skinny"), (1, 8)),
    "delta-decode": Variant("delta rule's decode as parts", op("gated_delta.decode=parts")),
    "delta-prompt": Variant("delta rule's prompts as parts", op("gated_delta.prefill=parts"), (1, 8)),
    "prologue": Variant("attention's prologue as parts", op("attention_prologue=parts")),
    "norms": Variant("add and norm as parts", op("add_rms_norm=parts")),
    "small": Variant("small ops by torch", without(*SMALL)),
    "table": Variant("request table by torch", op("step_inputs=reference", "advance_rows=reference")),
    "sample": Variant("sampling by torch", op("sample=reference")),
    "ranks": Variant("providers by rank, untimed", ("--table", "none")),
    "state": Variant("lossy: states in bfloat16", ("--state-dtype", "bfloat16")),
    "kv": Variant("lossy: KV in FP8", ("--kv-dtype", "float8_e4m3fn")),
}
"""By the names that `--variants` takes."""


@dataclass(frozen=True)
class Settings:
    """What all processes have in common. seconds: of a process at most; end: when all must be over, on the monotonic clock."""

    model: str
    context: int
    seconds: float
    end: float
    script: Path = SCRIPT


def run(variant: Variant, device: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """Measure a variant on a device: what its process has written, and `reason` if it didn't come to its end."""
    begin = time.monotonic()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    with tempfile.TemporaryDirectory() as folder:
        written, said = Path(folder) / "rows.json", Path(folder) / "said.txt"
        command = [
            sys.executable, str(settings.script), settings.model, "--json", str(written), "--rounds", "0", "--repeats", "3",
            "--context", str(settings.context), "--prompts", str(PROMPT), "--max-running", str(max(BATCHES)), "--batch", *map(str, variant.batches), *variant.arguments,
        ]  # fmt: skip
        reason = ""
        with said.open("wb") as output:
            try:
                status = subprocess.run(
                    command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=seconds, check=False
                ).returncode
                if status:
                    reason = f"ended with {status}: {last_words(said)}"
            except subprocess.TimeoutExpired:
                reason = f"cut after {seconds:.0f} s"
        try:
            result = json.loads(written.read_text())
        except FileNotFoundError:
            result = {}
    row = {"variant": variant.name, "device": device, "arguments": variant.arguments, "result": result}
    return row | {"seconds": time.monotonic() - begin, "reason": reason, **milliseconds(result)}


def last_words(said: Path) -> str:
    """The last line of a process's output that isn't empty."""
    lines = [line.strip() for line in said.read_text(errors="replace").splitlines()[-LAST_LINES:]]
    return next((line for line in reversed(lines) if line), "without a word")


def milliseconds(result: dict[str, Any]) -> dict[str, Any]:
    """The figures of a table's row: of the first token, and of a decode step by its number of requests; `uncounted`: those numbers of
    requests whose tokens weren't spread over experts as they should."""
    first = next((row["ms"] for row in result.get("first_token", [])), None)
    decode = result.get("decode", [])
    uncounted = [str(row["batch"]) for row in decode if row.get("counts") is False]
    return {
        "first_ms": first,
        "decode_ms": {str(row["batch"]): row["steady_ms"] for row in decode},
        "uncounted": uncounted,
    }


def replaced(result: dict[str, Any], base: dict[str, Any]) -> str:
    """Which providers compute what others computed before, as `op: before -> now`."""
    now, before = result.get("providers", {}), base.get("providers", {})
    changes = []
    for name in now:
        gone, come = (
            sorted(set(a) - set(b)) for a, b in ((before.get(name, []), now[name]), (now[name], before.get(name, [])))
        )
        if gone or come:
            changes.append(f"{name}: {', '.join(gone) or 'the same'} -> {', '.join(come) or 'the others'}")
    return "; ".join(changes)


def changed_providers(row: dict[str, Any], base: dict[str, Any]) -> str:
    """`replaced`, or that nothing was, where that is all that the variant is about."""
    if changes := replaced(row["result"], base["result"]):
        return changes
    asked = {"--op", "--without", "--table"} & {*row["arguments"]}
    return "the same providers as is: this measures nothing" if asked and row["result"] else ""


def heading() -> str:
    """Above the rows."""
    return f"{'ms (times as is)':32s}{f'first of {PROMPT}':>18s}" + "".join(f"{f'decode B={b}':>18s}" for b in BATCHES)


def line(row: dict[str, Any], base: dict[str, Any] | None) -> str:
    """A row for people; base: the same GPU's, of everything as it is."""

    uncounted = {*row["uncounted"], *(base["uncounted"] if base else ())}

    def cell(value: float | None, other: float | None, mark: str = "") -> str:
        if value is None:
            return f"{'-':>18s}"
        against = f" ({value / other:5.3f})" if other else ""
        return f"{f'{value:.2f}{against}{mark}':>18s}"

    cells = [cell(row["first_ms"], base and base["first_ms"])]
    for b in map(str, BATCHES):
        other = base and base["decode_ms"].get(b)
        cells.append(cell(row["decode_ms"].get(b), other, "!" if b in uncounted else ""))
    notes = [row["reason"], changed_providers(row, base) if base else ""]
    said = "".join(f"\n      {note}" for note in notes if note)
    return f"{row['variant']:32s}{''.join(cells)}   {row['seconds']:.0f} s on GPU {row['device']}{said}"


class Table:
    """The rows, printed and written as they come from all GPUs. path: of the JSON, or None."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.path, self.about, self.rows, self.lock = path, about, list[dict[str, Any]](), threading.Lock()

    def add(self, row: dict[str, Any], base: dict[str, Any] | None) -> None:
        """Another row."""
        with self.lock:
            self.rows.append(row)
            print(line(row, base), flush=True)
            if self.path is not None:
                self.path.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n")


def work(device: str, waiting: queue.SimpleQueue[Variant], settings: Settings, table: Table) -> None:
    """Everything as it is, then variants until none waits, then as it is once more, as far as the time goes."""

    def left() -> float:
        return settings.end - time.monotonic()

    base = run(AS_IS, device, settings, max(1.0, left()))  # whatever it compiles, the others needn't
    table.add(base, None)
    if base["reason"]:
        return
    while left() > base["seconds"]:
        try:
            variant = waiting.get_nowait()
        except queue.Empty:
            again = Variant("as is, again", AS_IS.arguments)
            table.add(run(again, device, settings, min(settings.seconds, left())), base)
            return
        table.add(run(variant, device, settings, min(settings.seconds, left())), base)


def measure(variants: Iterable[Variant], devices: Sequence[str], settings: Settings, table: Table) -> list[Variant]:
    """Spread variants over devices. Returns those that nobody came to."""
    waiting: queue.SimpleQueue[Variant] = queue.SimpleQueue()
    for variant in variants:
        waiting.put(variant)
    workers = [threading.Thread(target=work, args=(device, waiting, settings, table)) for device in devices]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [waiting.get_nowait() for _ in range(waiting.qsize())]


def visible_devices() -> list[str]:
    """The GPUs that processes may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="config.json, or a directory with one")
    parser.add_argument("--variants", nargs="*", choices=sorted(VARIANTS), metavar="NAME", default=list(VARIANTS),
                        help=f"default: all of {', '.join(VARIANTS)}")  # fmt: skip
    parser.add_argument("--context", type=int, default=4096, help="tokens of the prompts that decode steps follow")
    parser.add_argument("--seconds", type=float, default=75, help="of a process at most")
    parser.add_argument("--limit", type=float, default=300, help="seconds of all together")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    devices = visible_devices()
    if not devices:
        raise SystemExit("no GPU is visible here")
    settings = Settings(arguments.model, arguments.context, arguments.seconds, time.monotonic() + arguments.limit)
    table = Table(arguments.json, {"model": Path(arguments.model).name, "context": arguments.context, "gpus": devices})
    print(heading(), flush=True)
    for variant in measure([VARIANTS[name] for name in arguments.variants], devices, settings, table):
        print(f"{variant.name:32s}   not measured: time was up, or no GPU could measure what it is compared with")


if __name__ == "__main__":
    main()
