"""Whether a GPU computes what it should: `firstlight verify` for every family, and a real model's answers beside the CPU's.

    python benchmarks/gpu_checks.py verify [--json FILE]
    python benchmarks/gpu_checks.py answers [--gguf FILE] [--json FILE]

`verify` runs `firstlight verify` with random weights in a process for each tiny config of tests/tiny_configs that can be run, in
float32 and in bfloat16, and for the published config of Qwen3.5-35B-A3B in FP8 cut to `--layers`; `--at-once` of them side by side
over all visible GPUs, a line each as they end.

`answers` puts 20 questions to SmolLM2-135M-Instruct (examples/fetch_smollm2.py gets it) on the GPU and on the CPU, greedily, in float32
and in bfloat16. An answer may differ only from a token on for which two were as good: there the logits of both tokens, by
transformers on the CPU in float32, must be nearer than rounding in that dtype explains.

Exit status: 0 if all agree, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu import dequantised, firstlight_engine
from paths import last_words, visible_devices

from firstlight.models.registry import PREDICTED_ONLY

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests" / "tiny_configs"
PUBLISHED = ROOT / "tests" / "configs" / "Qwen3.5-35B-A3B-FP8.json"
DTYPES = ("float32", "bfloat16")

# verify


@dataclass(frozen=True)
class Job:
    """A model to verify. layers: how many of them; 0: all."""

    config: Path
    dtype: str
    layers: int = 0


def jobs(layers: int) -> list[Job]:
    """All there is to verify, the largest first."""
    tiny = [path for path in sorted(TINY.glob("*.json")) if _model_type(path) not in PREDICTED_ONLY]
    large = [Job(PUBLISHED, dtype, layers) for dtype in DTYPES] if layers else []
    return large + [Job(path, dtype) for path in tiny for dtype in DTYPES]


def _model_type(config: Path) -> str:
    return str(json.loads(config.read_text()).get("model_type"))


def verify(job: Job, device: str, gpu: str | None, seconds: float) -> dict[str, Any]:
    """Run a job in a process. gpu: the one that it sees, or None. The row has `verdict`: agree, FAULT or not tried."""
    begin = time.monotonic()
    threads = max(1, (os.cpu_count() or 1) // 8)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    row: dict[str, Any] = {"model": job.config.stem, "dtype": job.dtype, "layers": job.layers, "gpu": gpu}
    with tempfile.TemporaryDirectory() as folder:
        written, said = Path(folder) / "findings.json", Path(folder) / "said.txt"
        command = [
            sys.executable,
            "-m",
            "firstlight",
            "verify",
            str(job.config),
            "--weights",
            "random",
            "--device",
            device,
        ]
        command += ["--dtype", job.dtype, "--layers", str(job.layers), "--json", str(written)]
        with said.open("wb") as output:
            try:
                status = subprocess.run(
                    command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=seconds, check=False
                ).returncode
                why = last_words(said)
            except subprocess.TimeoutExpired:
                status, why = 2, f"cut after {seconds:.0f} s"
        report = json.loads(written.read_text()) if written.exists() else {}
    row["seconds"] = time.monotonic() - begin
    row["worst"] = report.get("worst_end_to_end")
    row["verdict"] = {0: "agree", 1: "FAULT"}.get(status if report else 2, "not tried")
    row["said"] = report.get("verdict", [why])
    return row


def verify_all(
    todo: Sequence[Job], device: str, gpus: Sequence[str], at_once: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Rows as they end. gpus: over which processes are spread; none for a CPU."""
    with ThreadPoolExecutor(at_once) as pool:
        running = [
            pool.submit(verify, job, device, gpus[i % len(gpus)] if gpus else None, seconds)
            for i, job in enumerate(todo)
        ]
        for done in as_completed(running):
            yield done.result()


def verify_line(row: dict[str, Any]) -> str:
    """A row for people; more lines if something is wrong."""
    worst = "-" if row["worst"] is None else f"{row['worst']:.1e}"
    layers = f", {row['layers']} layers" if row["layers"] else ""
    head = f"{row['model'] + layers:32s} {row['dtype']:9s} {row['verdict']:10s} {worst:>8s} {row['seconds']:6.1f} s"
    return head if row["verdict"] == "agree" else "\n      ".join([head, *row["said"]])


# Answers

TIES = {"float32": 1e-2, "bfloat16": 0.5}
"""Logits. Nearer than this two tokens are as good: what arithmetic in the dtype may move them by, over SmolLM2's 30 layers; see
`cpu.TIE`, of which this is half, as it is the gap of two candidates and not of one to the best."""
NEW_TOKENS = 64
PASSAGE = """The harbour lies at the end of a long valley. In spring the river brings down so much sand that boats have to wait for
the tide, and fishermen mend their nets on the quay. A railway was built in 1884 to carry slate from the quarries, which employed
four hundred men at their height. When the quarries closed, most families moved to the coast towns, but the school and the chapel
stayed open, and a small museum now shows the tools, the ledgers and the photographs of three generations."""
QUESTIONS = (
    "Hi!",
    "What is the capital of Peru?",
    "Name three metals and what each is used for.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is 17 plus 25? Answer with the number, then explain.",
    "Translate into French: The cat sleeps on the warm roof.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain to a child of eight how a seed becomes a tree.",
    "What are the advantages and the disadvantages of working from home? Give two of each.",
    "Give me a recipe for bread with five ingredients, as a numbered list.",
    "Who was Marie Curie, and what did she discover?",
    "Correct this sentence: him and me goes to the libary yesterday.",
    "Write a short e-mail to a landlord, asking politely for the heating to be repaired before the weekend.",
    "Sort these words by length and say which is the longest: pear, strawberry, fig, banana, apricot, kiwi.",
    'Return JSON with the keys "name", "age" and "city" for this person: Anna is 34 and lives in Turin.',
    f"Summarise this text in one sentence.\n\n{PASSAGE}",
    f"{PASSAGE}\n\nWhen was the railway built, and what did it carry?",
    f"Here are two notes.\n\nFirst: {PASSAGE}\n\nSecond: {PASSAGE.upper()}\n\nDo they say the same? Explain your answer.",
    f"Rewrite this text as a letter from a visitor to a friend.\n\n{' '.join([PASSAGE] * 3)}",
)


def chat_prompts(gguf: Path) -> tuple[list[list[int]], int | None]:
    """The questions in the model's chat format, and the token that ends its answers."""
    from firstlight.weights.checkpoint import open_checkpoint

    tokenizer = open_checkpoint(gguf).tokenizer()
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts], tokenizer.eos_token_id


def whole_answer(tokens: Sequence[int], end: int | None) -> list[int]:
    """An answer up to the token that ends it, if there is one."""
    return list(tokens[: tokens.index(end) + 1]) if end in tokens else list(tokens)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ, or None. An answer that goes on where the other ended can't be: both end alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


class Judge:
    """Logits of the next token, by transformers on the CPU in float32. model: the weights as a float32 checkpoint."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def gap(self, before: Sequence[int], one: int, other: int) -> float:
        """How far apart the logits of two tokens are after the tokens `before`."""
        with torch.inference_mode():
            logits = self.network(torch.tensor([list(before)])).logits[0, -1]
        return abs(float(logits[one] - logits[other]))


def compare(
    prompts: Sequence[Sequence[int]], here: Sequence[list[int]], there: Sequence[list[int]], dtype: str, judge: Judge
) -> list[dict[str, Any]]:
    """A row for each prompt: `verdict` is equal, tie or FAULT; `place` and `gap` of the first difference."""
    rows = []
    for number, (prompt, one, other) in enumerate(zip(prompts, here, there, strict=True)):
        row: dict[str, Any] = {"dtype": dtype, "prompt": number, "tokens": len(one), "verdict": "equal"}
        if (place := first_difference(one, other)) is not None:
            gap = judge.gap([*prompt, *one[:place]], one[place], other[place])
            row |= {"place": place, "gap": gap, "verdict": "tie" if gap <= TIES[dtype] else "FAULT"}
            row["differ"] = (one[place], other[place])
        elif len(one) != len(other):
            row["verdict"] = "FAULT"
        rows.append(row)
    return rows


def answers(gguf: Path, device: str, dtypes: Sequence[str], count: int) -> Iterator[dict[str, Any]]:
    """Rows of `compare` for the first `count` questions, with each prompt's length."""
    prompts, end = chat_prompts(gguf)
    prompts = prompts[:count]
    with tempfile.TemporaryDirectory() as folder:
        plain = {name: dequantised(gguf, Path(folder) / name, name) for name in {*dtypes, "float32"}}
        judge = Judge(plain["float32"])
        for dtype in dtypes:
            told = []
            # The same weights: a CPU without AVX-512 would unpack the file's own again for every step, which takes minutes.
            for place, model in (("cpu", plain[dtype]), (device, gguf)):
                begin = time.monotonic()
                tokens = firstlight_engine(str(model), dtype, place, threads=0)(prompts, NEW_TOKENS)
                told.append([whole_answer(answer, end) for answer in tokens])
                print(f"{dtype} on {place}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
            for row, prompt in zip(compare(prompts, *told, dtype, judge), prompts, strict=True):
                yield row | {"prompt_tokens": len(prompt)}


def answer_line(row: dict[str, Any]) -> str:
    """A row for people."""
    head = f"{row['dtype']:9s} {row['prompt']:6d} {row['prompt_tokens']:8d} {row['tokens']:8d}  {row['verdict']:6s}"
    return f"{head} from token {row['place']}, logits {row['gap']:.4f} apart" if "place" in row else head


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("verify", "answers"))
    parser.add_argument("--device", default="cuda", help="cpu: to see that this script runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--layers", type=int, default=4, help="of the published model; 0: leave it out")
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--at-once", type=int, default=8, help="processes")
    parser.add_argument("--seconds", type=float, default=240, help="of a process at most")
    home = Path.home() / ".cache" / "firstlight"
    parser.add_argument("--gguf", type=Path, default=home / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="so many of the questions")
    arguments = parser.parse_args()
    if arguments.what == "verify":
        todo = [
            job for job in jobs(arguments.layers) if arguments.only in job.config.stem and job.dtype in arguments.dtypes
        ]
        gpus = [] if arguments.device == "cpu" else visible_devices()
        rows = verify_all(todo, arguments.device, gpus, arguments.at_once, arguments.seconds)
        line, right = verify_line, ("agree",)
        print(f"{'model':32s} {'dtype':9s} {'verdict':10s} {'worst':>8s} {'time':>8s}")
    else:
        rows, line, right = (
            answers(arguments.gguf, arguments.device, arguments.dtypes, arguments.prompts),
            answer_line,
            ("equal", "tie"),
        )
        print(f"{'dtype':9s} {'prompt':>6s} {'its':>8s} {'answer':>8s}")
    found, begin = [], time.monotonic()
    for row in rows:
        print(line(row), flush=True)
        found.append(row)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    verdicts = [row["verdict"] for row in found]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    print(f"{counts}; {time.monotonic() - begin:.0f} s")
    if not found or any(verdict not in right for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
