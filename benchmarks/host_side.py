"""One side of `hosts.py`: a host's offline engine in a process of its own, with Firstlight's classes or with the host's.

`run_side` starts this file as a process, which starts the engine, says so, and waits: only when the host's log has said whose
class serves is it told to go on. What it finds it says at once, so a side that is stopped has said what it had.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from host_engines import HOSTS, Engine

PLUGIN, PLAIN = "plugin", "plain"
TOLD = 3
"""File descriptor of what a side says; what the host's processes print goes to the log."""
DECODING = re.compile(r"Decode batch.*#running-req: (\d+),.*gen throughput \(token/s\): ([\d.]+)")
SETTLE_SECONDS = 3.0
"""A GPU's memory is free again a moment after its process has gone."""

SHORT, LONG, FIRST_TOKENS = 8, 136, 5
ONE_ROUND_TOKENS = 2**18
"""Prompts of so many tokens together take seconds: a larger batch is timed once, and warmed up by those before it."""
NEW_TOKENS, ALTERNATIVES = 64, 20
"""Of an answer; and tokens whose log probabilities are kept at each place of it."""


def serve(job: dict[str, Any]) -> None:
    """Start the engine and do what the job says. job: "host", "flags" of its engine, "do", and what that takes."""
    import torch

    start = time.perf_counter()
    engine = HOSTS[job["host"]].engine(job["flags"])
    seconds = time.perf_counter() - start
    say("ready", seconds=seconds, host=job["host"], version=engine.version, torch=torch.__version__)
    if sys.stdin.readline() == "go\n":
        {"time": time_engine, "answer": answer}[job["do"]](engine, job)
    engine.shutdown()
    if torch.cuda.is_available():
        say("device", gpu=torch.cuda.get_device_name())


def say(kind: str, **values: Any) -> None:
    """Tell the process that started this one."""
    with open(TOLD, "w", closefd=False) as told:
        print(json.dumps({"kind": kind, **values}), file=told)


def time_engine(engine: Engine, job: dict[str, Any]) -> None:
    """First tokens and decode steps; times in milliseconds.

    job: "vocabulary", "temperature"; lengths of "prompts" for first tokens; "batch" sizes, their "context" and "rounds".
    """
    draw = random.Random(0)
    vocabulary = job["vocabulary"]
    low, high = (1000, vocabulary - 1000) if vocabulary > 4000 else (0, vocabulary)

    def run(batch: int, prompt: int, new: int) -> float:
        ids = [[draw.randrange(low, high) for _ in range(prompt)] for _ in range(batch)]
        start = time.perf_counter()
        answers = engine.generate(ids, job["temperature"], new)
        elapsed = time.perf_counter() - start
        counts = {len(one) for one in answers}
        if counts != {new}:
            raise SystemExit(f"{batch} requests of {new} tokens gave {sorted(counts)}")
        return elapsed * 1e3

    for length in job["prompts"]:
        run(1, length, 1)
        times = sorted(run(1, length, 1) for _ in range(FIRST_TOKENS))
        say("first_token", prompt=length, ms=statistics.median(times), all_ms=times)
    for i, batch in enumerate(job["batch"]):
        large = batch * job["context"] > ONE_ROUND_TOKENS
        if not large or i == 0:
            run(batch, job["context"], SHORT)
        steps: list[float] = []
        for _ in range(1 if large else job["rounds"]):
            short = run(batch, job["context"], SHORT)
            steps.append((run(batch, job["context"], LONG) - short) / (LONG - SHORT))
            say("decode", batch=batch, ms=statistics.median(steps), all_ms=steps, steady_ms=engine.steady_ms)


def answer(engine: Any, job: dict[str, Any]) -> None:
    """SGLang's greedy answers to the job's "prompts" at once, and then to each with its answer and three tokens more."""
    prompts = job["prompts"]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    for _ in range(2):
        told = engine.engine.generate(
            input_ids=prompts, sampling_params=sampling, return_logprob=True, top_logprobs_num=ALTERNATIVES
        )
        answers = [one["output_ids"] for one in told]
        likely = [
            [[[token, value] for value, token, *_ in place] for place in one["meta_info"]["output_top_logprobs"]]
            for one in told
        ]
        cached = sum(one["meta_info"]["cached_tokens"] for one in told)
        say("answers", prompts=prompts, answers=answers, likely=likely, cached=cached)
        prompts = [[*prompt, *said, 7, 8, 9] for prompt, said in zip(prompts, answers, strict=True)]


def run_side(
    side: str,
    job: dict[str, Any],
    log: Path,
    seconds: float,
    heard: Callable[[dict[str, Any]], None],
    environment: dict[str, str] | None = None,
) -> None:
    """Do a job in a fresh process; `heard` gets what it says. The host's log goes to `log`.

    side: whose classes. job: as `serve` takes it, with the number of "ranks". Raises SystemExit if others serve, or the process
    fails or takes longer than `seconds`.
    """
    switch = {"FIRSTLIGHT_PLUGIN": "on" if side == PLUGIN else "off", "PYTHONUNBUFFERED": "1"}
    late = threading.Event()
    host, wanted = HOSTS[job["host"]], job["ranks"] if side == PLUGIN else 0
    with (
        log.open("w") as file,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), json.dumps(job)],
            env={**os.environ, **switch, **host.environment, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, lambda: (late.set(), kill(process.pid)))
        timer.start()
        try:
            for line in process.stdout:
                told = json.loads(line)
                if told["kind"] == "ready":
                    if (serving := len(host.serves.findall(log.read_text()))) != wanted:
                        declined = "".join(host.declines.findall(log.read_text())[:1])
                        raise SystemExit(
                            f"{side}: Firstlight's class serves on {serving} ranks, not on {wanted}. {declined} ({log})"
                        )
                    process.stdin.write("go\n")
                    process.stdin.flush()
                elif told["kind"] == "decode" and told["steady_ms"] is None:
                    told["steady_ms"] = steady_milliseconds(log.read_text(), told["batch"])
                heard(told)
        finally:
            timer.cancel()
            kill(process.pid)
    time.sleep(SETTLE_SECONDS)
    if late.is_set():
        raise SystemExit(f"{side}: not done after {seconds:.0f} s ({log})")
    if process.returncode:
        raise SystemExit(f"{side}: ended with {process.returncode} ({log})")


def steady_milliseconds(log: str, batch: int) -> float | None:
    """A step by the rates that SGLang logged while so many requests decoded: their median; None if there is none."""
    rates = [float(rate) for running, rate in DECODING.findall(log) if int(running) == batch]
    return batch / max(statistics.median(rates), 1e-9) * 1e3 if rates else None


def kill(group: int) -> None:
    """End a side and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    os.dup2(1, TOLD, inheritable=False)
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]))
