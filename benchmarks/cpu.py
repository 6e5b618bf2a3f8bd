"""Decoding on a CPU: Firstlight (bfloat16, and the GGUF's int4 as shipped), vLLM's CPU build and transformers, side by side.

    python benchmarks/cpu.py [--rounds 3] [--vllm ~/.cache/firstlight-vllm/bin/python] [--engines firstlight-int4 vllm ...]

The model is SmolLM2-135M-Instruct from its GGUF file; the bfloat16 engines read the same weights, dequantised once into a
checkpoint in the cache. Every engine runs in a process of its own, in turns, round after round, so that all see the machine
in the same moods; the table gives medians, and in brackets the lowest and highest round. Random prompts of 128 tokens, 64
greedy tokens each, prefix caches off. A decode rate is over the tokens after the first.

Before anything is timed, each engine answers 50 questions, and transformers in float32, over the dequantised weights, scores
the answers token by token: an engine agrees if each of its tokens is the best one, or within a tie of it. bfloat16 moves
logits by some tenths, so engines that are all right differ in such tokens. Firstlight is timed only if it agrees.

vLLM needs an environment of its own: `benchmarks/install_vllm.sh`; without it its rows are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT_TOKENS, NEW_TOKENS, ANSWER_TOKENS = 128, 64, 24
BATCHES = (1, 16)
TIE = 1.0
"""Logits. What bfloat16 arithmetic (8 bits of mantissa, 30 layers) may change between two good tokens of this model."""

TOPICS = ["France", "Japan", "Brazil", "Egypt", "Canada", "rain", "gravity", "bread", "music", "chess", "honey", "iron"]
TOPICS += ["trees", "whales", "dreams", "the Moon"]
QUESTIONS = [f"What is the capital of {place}?" for place in ("France", "Japan", "Italy", "Spain", "Egypt", "Peru")]
QUESTIONS += [f"Write one sentence about {topic}." for topic in TOPICS]
QUESTIONS += [f"Why do people like {topic}?" for topic in TOPICS]
QUESTIONS += [f"What is {a} plus {b}?" for a, b in ((1, 2), (3, 4), (5, 5), (7, 8), (10, 10), (12, 30))]
QUESTIONS += [f"Name three {things}." for things in ("colours", "animals", "fruits", "planets", "rivers", "metals")]

Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""(prompts, new tokens) -> new token ids of each: greedy, not ending at the end-of-sequence token."""


# The engines, each imported in its own process only


def firstlight_engine(model: str, dtype: Any = "bfloat16", device: str = "cpu", threads: int = 2) -> Generate:
    """Firstlight's engine without a server."""
    import numpy as np

    from firstlight.config import EngineOptions
    from firstlight.engine.engine import Engine
    from firstlight.scheduling.request import Request
    from firstlight.scheduling.sampling import SamplingParams

    engine = Engine(
        EngineOptions(
            model=model,
            dtype=dtype,
            device=device,
            threads=threads,
            prefix_cache=False,
            max_context=1024,
            max_running=32,
        )
    )
    runs = 0

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        nonlocal runs
        runs += 1
        names = [f"{runs}-{i}" for i in range(len(prompts))]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        for name, prompt in zip(names, prompts, strict=True):
            engine.add(Request(name, np.array(prompt, np.int32), SamplingParams(temperature=0, max_tokens=count)))
        while engine.has_work():
            for delta in engine.step():
                tokens[delta.id].extend(int(token) for token in delta.tokens)
        return [tokens[name] for name in names]

    return generate


def vllm_engine(model: str) -> Generate:
    """vLLM in this process, compiled, both cores."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="0-1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=64,
        skip_tokenizer_init=True,
    )

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, sampling, use_tqdm=False)]

    return generate


def transformers_engine(model: str) -> Generate:
    """transformers' generate; prompts of different lengths go one by one."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        if len({len(prompt) for prompt in prompts}) > 1:
            return [generate([prompt], count)[0] for prompt in prompts]
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            result = network.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count
            )
        return result[:, ids.shape[1] :].tolist()

    return generate


ENGINES: dict[str, tuple[Callable[[str], Generate], str]] = {
    "firstlight-bf16": (firstlight_engine, "bfloat16"),
    "firstlight-int4": (firstlight_engine, "gguf"),
    "vllm-bf16": (vllm_engine, "bfloat16"),
    "transformers-bf16": (transformers_engine, "bfloat16"),
}
"""Name -> how to start it, and which form of the model it reads."""


# What a process of an engine does


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Answers to the questions, or times of one round: per batch, seconds to the first token and tokens/s after it."""
    generate = ENGINES[job["engine"]][0](job["model"])
    if "questions" in job:
        return {"answers": generate(job["questions"], ANSWER_TOKENS)}
    noise = random.Random(job["round"])
    rates: dict[str, dict[str, float]] = {}
    for batch in BATCHES:
        generate(random_prompts(noise, batch, job["vocabulary"]), 4)  # compile, allocate, warm up
        first = [timed(generate, random_prompts(noise, batch, job["vocabulary"]), 1) for _ in range(2)]
        whole = timed(generate, random_prompts(noise, batch, job["vocabulary"]), 1 + NEW_TOKENS)
        first_s = statistics.median(first)
        rates[str(batch)] = {"first_s": first_s, "decode": batch * NEW_TOKENS / (whole - first_s)}
    return {"rates": rates}


def random_prompts(noise: random.Random, count: int, vocabulary: int) -> list[list[int]]:
    """Prompts of PROMPT_TOKENS ids each."""
    return [[noise.randrange(vocabulary // 2, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def timed(generate: Generate, prompts: list[list[int]], count: int) -> float:
    """Seconds that it takes; raises RuntimeError if tokens are missing."""
    start = time.perf_counter()
    tokens = generate(prompts, count)
    seconds = time.perf_counter() - start
    if any(len(answer) != count for answer in tokens):
        raise RuntimeError(f"asked for {count} tokens each, got {[len(answer) for answer in tokens]}")
    return seconds


def run_worker(python: str, job: dict[str, Any]) -> dict[str, Any]:
    """`work(job)` in a new process. Raises RuntimeError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder) / "job.json", Path(folder) / "result.json"
        task.write_text(json.dumps(job))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [python, __file__, "--worker", str(task), str(result)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
        if done.returncode or not result.exists():
            raise RuntimeError(f"{job['engine']} failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-15:]))
        return json.loads(result.read_text())


# Preparation and judgement, in this process


def dequantised(gguf: Path, target: Path, dtype: str) -> Path:
    """The GGUF's weights as a safetensors checkpoint of `dtype`, made once."""
    import torch
    from safetensors.torch import save_file

    from firstlight.weights.checkpoint import open_checkpoint

    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(gguf)
    kind = getattr(torch, dtype)
    tensors = {name: stored.load().to(kind).clone() for name, stored in checkpoint.tensors.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in checkpoint.config.items() if key != "gguf_architecture"}
    (target / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=1))
    return target


def chat_prompts(gguf: Path) -> list[list[int]]:
    """The questions, in the model's chat format."""
    from firstlight.weights.checkpoint import open_checkpoint

    tokenizer = open_checkpoint(gguf).tokenizer()
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def judge(
    model: Path, prompts: list[list[int]], answers: dict[str, list[list[int]]]
) -> dict[str, tuple[int, int, float]]:
    """For each engine: answers that are the oracle's own, tokens that aren't its best, and the worst of their gaps (logits)."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    verdicts = {}
    for engine, of_engine in answers.items():
        same, other, worst = 0, 0, 0.0
        for prompt, answer in zip(prompts, of_engine, strict=True):
            with torch.inference_mode():
                logits = network(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
            gaps = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            same += not gaps.any()
            other += int((gaps > 0).sum())
            worst = max(worst, float(gaps.max()))
        verdicts[engine] = (same, other, worst)
    return verdicts


def spread(values: Sequence[float], digits: int = 0) -> str:
    """`median (lowest-highest)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def print_table(rates: dict[str, list[dict[str, dict[str, float]]]], peer: str = "vllm-bf16") -> None:
    """Medians of the rounds, and the ratio of decode rates to vLLM's bfloat16."""
    print(f"\n| engine | batch | first token, ms | decode, tokens/s | x {peer} |\n|---|---|---|---|---|")
    for engine, rounds in rates.items():
        for batch in map(str, BATCHES):
            decode = [one[batch]["decode"] for one in rounds]
            first = [one[batch]["first_s"] * 1e3 for one in rounds]
            ratio = "-"
            if peer in rates:
                ratio = (
                    f"{statistics.median(decode) / statistics.median(one[batch]['decode'] for one in rates[peer]):.2f}"
                )
            print(f"| {engine} | {batch} | {spread(first)} | {spread(decode, 1)} | {ratio} |")


def main() -> None:
    """Prepare, check the answers, time, print."""
    home = Path.home() / ".cache"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=home / "firstlight" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--vllm", type=Path, default=home / "firstlight-vllm" / "bin" / "python", help="its Python")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-answers", action="store_true", help="time without checking the answers first")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        arguments.worker[1].write_text(json.dumps(work(json.loads(arguments.worker[0].read_text()))))
        return
    if not arguments.gguf.is_file():
        sys.exit(f"{arguments.gguf}: no such file; get it with: python examples/fetch_smollm2.py")
    engines = list(arguments.engines)
    if "vllm-bf16" in engines and not arguments.vllm.exists():
        print(f"vllm-bf16 left out: no {arguments.vllm}; make it with: bash benchmarks/install_vllm.sh")
        engines.remove("vllm-bf16")
    cache = arguments.gguf.parent / "benchmark"
    models = {"gguf": arguments.gguf, "bfloat16": dequantised(arguments.gguf, cache / "bfloat16", "bfloat16")}
    vocabulary = json.loads((models["bfloat16"] / "config.json").read_text())["vocab_size"]

    def run(engine: str, **job: Any) -> dict[str, Any]:
        python = str(arguments.vllm) if engine == "vllm-bf16" else sys.executable
        return run_worker(python, {"engine": engine, "model": str(models[ENGINES[engine][1]]), **job})

    if not arguments.skip_answers:
        prompts = chat_prompts(arguments.gguf)
        answers = {engine: run(engine, questions=prompts)["answers"] for engine in engines}
        verdicts = judge(dequantised(arguments.gguf, cache / "float32", "float32"), prompts, answers)
        for engine, (same, other, worst) in verdicts.items():
            print(
                f"{engine}: {same} of {len(prompts)} answers token for token those of transformers in float32; "
                f"{other} of {len(prompts) * ANSWER_TOKENS} tokens are not its best, by {worst:.2f} logits at most"
            )
        # Only our own answers can stop the table: what a peer gives up is printed above, and its time is still its time.
        if wrong := [name for name, verdict in verdicts.items() if name.startswith("firstlight") and verdict[2] > TIE]:
            sys.exit(f"not timed: answers of {', '.join(wrong)} differ by more than a tie of {TIE} logits")
    rates: dict[str, list[dict[str, dict[str, float]]]] = {engine: [] for engine in engines}
    for number in range(arguments.rounds):
        for engine in engines:
            rates[engine].append(run(engine, round=number, vocabulary=vocabulary)["rates"])
            print(f"round {number + 1} {engine}: {rates[engine][-1]}", file=sys.stderr)
    print_table(rates)


if __name__ == "__main__":
    main()
