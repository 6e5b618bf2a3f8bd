"""Whether `firstlight bench` and vLLM's own `vllm bench serve` measure the same on the same server.

    python benchmarks/bench_agreement.py [--servers paced firstlight vllm] [--rounds 5] [--live] [--json FILE]

Both clients send the same prompts of SmolLM2-135M-Instruct, of many lengths, with the same lengths of answers, `--concurrency`
at once. The table gives medians over the rounds, and their ratio. The servers:

- `paced` answers by the clock (tests/bench/paced_server.py), so both can be compared with the truth;
- `firstlight` and `vllm` are those servers with that model. What they send under such a load is recorded first, with its times,
  and played again to both clients (replay_server.py): a server does not take the same time twice, least of all on a machine that
  others use. With `--live` the clients ask the servers themselves, at the same time; for a quiet machine and many rounds.

In each round our client begins when the other's load has begun. vLLM needs an environment of its own:
benchmarks/install_vllm.sh.

Exit status: 0 if every median and mean of both agrees within --tolerance (tails are shown, not judged), else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cpu import dequantised
from replay_server import record
from serving import Server, firstlight_server, free_port, started

from firstlight.config import Span
from firstlight.weights.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
JUDGED = (
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median")),
)
SHOWN = tuple(f"p99_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el"))
EQUAL = ("completed", "total_input_tokens", "total_output_tokens")
"""What both must count alike, exactly."""
FIRST_MS, GAP_MS = 500, 20
"""Of the paced server."""
SERVERS = ("paced", "firstlight", "vllm")
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def write_prompts(
    gguf: Path, target: Path, count: int, prompt_tokens: Span, answer_tokens: Span
) -> list[dict[str, Any]]:
    """Texts of random words, each a token of its own, so that their lengths are known; the lines that were written."""
    tokenizer = load_tokenizer(gguf)
    assert tokenizer is not None
    words = [
        text
        for id in range(2000, 12000)
        if (text := tokenizer.decode([id])).startswith(" ") and text[1:].isalpha() and text.isascii()
    ]
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(count):
        tokens = int(rng.integers(prompt_tokens.low, prompt_tokens.high + 1))
        text = "".join(rng.choice(words, tokens))
        assert len(tokenizer.encode(text)) == tokens, text
        answer = int(rng.integers(answer_tokens.low, answer_tokens.high + 1))
        lines.append({"prompt": text, "output_tokens": answer})
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def text_checkpoint(gguf: Path, folder: Path) -> Path:
    """The GGUF's weights in bfloat16, with its tokenizer, as vLLM's server reads them."""
    dequantised(gguf, folder, "bfloat16")
    tokenizer = load_tokenizer(gguf)
    assert tokenizer is not None
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def replayed(server: Server, lines: list[dict[str, Any]], at_once: int, folder: Path) -> Iterator[Server]:
    """What this server answers, recorded, from another one."""
    print("recording", file=sys.stderr)
    path = folder / "recording.json"
    path.write_text(json.dumps(asyncio.run(record(server.url, server.model, lines, at_once))))
    with started([sys.executable, str(ROOT / "benchmarks" / "replay_server.py"), str(path)], 60) as replaying:
        yield replaying


@contextlib.contextmanager
def server_of(name: str, gguf: Path, checkpoint: Path, vllm: Path) -> Iterator[Server]:
    """One of the servers, ready."""
    if name == "paced":
        command = [sys.executable, str(ROOT / "tests" / "bench" / "paced_server.py")]
        with started([*command, "--first-ms", str(FIRST_MS), "--gap-ms", str(GAP_MS)], 60) as server:
            yield server
    elif name == "firstlight":
        options = ["--threads", "1", "--no-prefix-cache", "--max-context", "2048", "--cache-gib", "0.5"]
        with firstlight_server([str(gguf), *options]) as server:
            yield server
    else:
        port = free_port()
        command = [str(vllm / "vllm"), "serve", str(checkpoint), "--served-model-name", "smollm2", "--port", str(port)]
        command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--no-enable-prefix-caching", "--enforce-eager"]
        with started(command, 300, f"http://127.0.0.1:{port}") as server:
            yield server


def firstlight_command(url: str, prompts: Path, concurrency: int, target: Path) -> list[str]:
    """`firstlight bench` of these prompts."""
    command = [sys.executable, "-m", "firstlight", "bench", "--url", url, "--trace", str(prompts)]
    return [*command, "--concurrency", str(concurrency), "--json", str(target)]


def vllm_command(
    server: Server, prompts: Path, concurrency: int, target: Path, vllm: Path, checkpoint: Path
) -> list[str]:
    """`vllm bench serve` of these prompts."""
    count = sum(1 for _ in prompts.open())
    command = [str(vllm / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", server.url]
    command += ["--endpoint", "/v1/completions", "--model", server.model, "--tokenizer", str(checkpoint)]
    command += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template", "--disable-shuffle"]
    command += ["--custom-output-len", "-1", "--num-prompts", str(count), "--max-concurrency", str(concurrency)]
    command += ["--ignore-eos", "--temperature", "0", "--num-warmups", "1"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm", "--save-result"]
    return [*command, "--result-filename", target.name, "--result-dir", str(target.parent)]


def run_both(ours: list[str], theirs: list[str]) -> None:
    """Run vLLM's client, and ours from the moment when its load begins."""
    with subprocess.Popen(theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as other:
        assert other.stdout is not None
        said = []
        for line in other.stdout:
            said.append(line)
            if line.startswith("Starting main benchmark run"):
                break
        done = subprocess.run(ours, capture_output=True, text=True)
        said += other.stdout.readlines()
    if other.returncode:
        sys.exit(f"vllm bench serve failed:\n{''.join(said)[-3000:]}")
    if done.returncode:
        sys.exit(f"firstlight bench failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float) -> tuple[list[list[str]], bool]:
    """Rows of a table, and whether all that is judged agrees."""
    rows, agree = [], True
    for name in (*EQUAL, *JUDGED, *SHOWN):
        a, b = (statistics.median(run[name] for run in runs) for runs in (ours, theirs))
        ratio = a / b if b else float("nan")  # chunks that came in one read are 0 ms apart
        verdict = ""
        if name in EQUAL:
            same = {run[name] for run in ours} == {run[name] for run in theirs}
            verdict = "equal" if same else "DIFFERENT"
            agree &= same
        elif name in JUDGED:
            within = abs(ratio - 1) <= tolerance
            verdict = "" if within else "OUTSIDE"
            agree &= within
        else:
            verdict = "not judged"
        rows.append([name, f"{a:,.4g}", f"{b:,.4g}", f"{ratio:.4f}", _spread(name, ours, theirs), verdict])
    return rows, agree


def _spread(name: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """The ratios of the single rounds, lowest and highest."""
    ratios = [a[name] / b[name] if b[name] else float("nan") for a, b in zip(ours, theirs, strict=True)]
    return f"{min(ratios):.3f}-{max(ratios):.3f}"


def main() -> None:
    """Prepare, run, compare."""
    home = Path.home() / ".cache"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-tokens", default="32-160")
    parser.add_argument("--output-tokens", default="16-80")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--gguf", type=Path, default=home / "firstlight" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--vllm", type=Path, default=home / "firstlight-vllm" / "bin", help="folder of vLLM's commands")
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    arguments = parser.parse_args()
    os.environ.update(VLLM_ENVIRONMENT)
    checkpoint = text_checkpoint(arguments.gguf, arguments.gguf.parent / "benchmark" / "bfloat16-text")
    all_agree, record = True, {}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        lengths = Span.parse(arguments.input_tokens), Span.parse(arguments.output_tokens)
        lines = write_prompts(arguments.gguf, prompts, arguments.requests, *lengths)
        for name in arguments.servers:
            ours: list[dict[str, Any]] = []
            theirs: list[dict[str, Any]] = []
            with contextlib.ExitStack() as stack:
                server = stack.enter_context(server_of(name, arguments.gguf, checkpoint, arguments.vllm))
                if name != "paced" and not arguments.live:
                    server = stack.enter_context(replayed(server, lines, arguments.concurrency, Path(folder)))
                for number in range(arguments.rounds):
                    here, there = Path(folder) / "ours.json", Path(folder) / "theirs.json"
                    run_both(
                        firstlight_command(server.url, prompts, arguments.concurrency, here),
                        vllm_command(server, prompts, arguments.concurrency, there, arguments.vllm, checkpoint),
                    )
                    ours.append(json.loads(here.read_text()))
                    theirs.append(json.loads(there.read_text()))
                    print(f"{name}: round {number + 1} of {arguments.rounds}", file=sys.stderr)
            rows, agree = compare(ours, theirs, arguments.tolerance)
            all_agree &= agree
            record[name] = {"firstlight bench": ours, "vllm bench serve": theirs}
            print(f"\nserver: {name}; {arguments.requests} requests, {arguments.concurrency} at once, ", end="")
            print(f"{arguments.input_tokens} + {arguments.output_tokens} tokens, {arguments.rounds} rounds\n")
            print(
                "| figure | firstlight bench | vllm bench serve | ratio | single rounds | |\n|---|---|---|---|---|---|"
            )
            for row in rows:
                print("| " + " | ".join(row) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))
    sys.exit(0 if all_agree else 1)


if __name__ == "__main__":
    main()
