"""A server under load by clients who come, read, lose patience and leave: does anything leak, stall or lie?

    python benchmarks/soak.py MODEL [--weights random] [--seconds 300] [--at-once 100] [--json soak.json]

`--at-once` clients ask for answers of random lengths to random prompts (token ids; some share prefixes), one request after the
other, for `--seconds`. A third of the requests is given up: before the answer begins, after some tokens, or after some time.
Then everything is let end, and the soak fails (exit status 1) unless

- no request failed but by being given up, and every answer had the tokens asked for;
- the server counted every request that was sent, and no more answers given up than were;
- nothing runs or waits any more, and without the prefix cache (`--server-option=--no-prefix-cache`) no page or slot is in use;
- memory: on a GPU, what the allocator holds was the same at each look after the first tenth, and it never had to give memory
  back; on a CPU, the engine process grew by less than --growth-mib over that time;
- no half second passed in which many requests ran and none got a token, longer than --stall-seconds in all;
- the server's log has no error in it, so that the scheduler's own accounts (checked when nothing runs) added up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from serving import Server, firstlight_server

from firstlight.bench.client import Client
from firstlight.bench.outcome import Outcome
from firstlight.config import BenchOptions

GIVEN_UP_SHARE = 1 / 3
PREFIXES, PREFIX_SHARE = 8, 0.5
LOOK_SECONDS = 1.0
IDLE_SECONDS = 60
CHECK_SECONDS = 11
"""The engine checks its accounts when nothing runs, at most once in 10 s."""


@dataclass
class Look:
    """The server at one moment. memory_bytes: the GPU allocator's; on a CPU the engine process's resident memory."""

    seconds: float
    memory_bytes: int
    running: int
    pages_used: int
    tokens: int


@dataclass
class Soak:
    """What happened. ways: answers by how they ended: `whole`, or the way in which they were given up. silent: of these,
    given up before anything came, so that the server may never have read them."""

    ways: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    wrong_lengths: int = 0
    silent: int = 0
    sent: int = 0
    looks: list[Look] = field(default_factory=list)


async def soak(
    server: Server, seconds: float, at_once: int, longest_prompt: int, longest_answer: int, seed: int
) -> tuple[Soak, dict[str, float]]:
    """Put the load on; what happened, and the server's metrics once all is quiet."""
    result = Soak()
    options = BenchOptions(url=server.url, temperature=1.0, return_token_ids=True, timeout_seconds=600)
    rng = np.random.default_rng(seed)
    async with Client(options) as client:
        await client.find_model()
        vocabulary = int(client.model["vocab_size"])
        prefixes = [rng.integers(0, vocabulary, longest_prompt // 2).tolist() for _ in range(PREFIXES)]
        end = time.perf_counter() + seconds
        looking = asyncio.create_task(_look(server, client, result, end))
        await asyncio.gather(
            *(
                _come_and_go(
                    client,
                    result,
                    np.random.default_rng([seed, number]),
                    prefixes,
                    vocabulary,
                    end,
                    longest_prompt,
                    longest_answer,
                )
                for number in range(at_once)
            )
        )
        await looking
        await asyncio.to_thread(_when_quiet, server)
        # When a request's end leaves the engine idle, it checks its accounts, unless it did so a moment ago.
        await asyncio.sleep(CHECK_SECONDS)
        last = Outcome(0, 0, 1, 1)
        await client.ask({"prompt": [0]}, last)
        result.sent += 1
        _judge(result, last)
    return result, await asyncio.to_thread(_when_quiet, server)


async def _come_and_go(
    client: Client,
    result: Soak,
    rng: np.random.Generator,
    prefixes: list[list[int]],
    vocabulary: int,
    end: float,
    longest_prompt: int,
    longest_answer: int,
) -> None:
    """One client, until the time is over. What has begun then is let end."""
    while time.perf_counter() < end:
        prompt = prefixes[rng.integers(len(prefixes))] if rng.random() < PREFIX_SHARE else []
        prompt = [*prompt, *rng.integers(0, vocabulary, rng.integers(1, longest_prompt - len(prompt) + 1)).tolist()]
        outcome = Outcome(0, 0, len(prompt), int(rng.integers(1, longest_answer + 1)))
        asking = asyncio.create_task(client.ask({"prompt": prompt}, outcome))
        result.sent += 1
        way = "whole"
        if rng.random() < GIVEN_UP_SHARE:
            way = str(rng.choice(["before the first token", "after some tokens", "after some time"]))
            await _wait(way, asking, outcome, rng)
        if way == "whole" or asking.done():
            await asking
            _judge(result, outcome)
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            result.ways[way] += 1
            result.silent += not outcome.chunk_times


async def _wait(way: str, asking: asyncio.Task[None], outcome: Outcome, rng: np.random.Generator) -> None:
    """Until it is time to give up, or the answer is whole before that."""
    if way == "before the first token":
        await asyncio.wait([asking], timeout=float(rng.exponential(0.02)))
    elif way == "after some time":
        await asyncio.wait([asking], timeout=float(rng.exponential(1.0)))
    else:
        wanted = int(rng.integers(1, outcome.asked_output + 1))
        while not asking.done() and len(outcome.chunk_times) < wanted:
            await asyncio.wait([asking], timeout=0.01)


def _judge(result: Soak, outcome: Outcome) -> None:
    if outcome.failure is None:
        result.ways["whole"] += 1
        result.wrong_lengths += outcome.generated != outcome.asked_output
    else:
        result.failures[outcome.failure.kind] += 1
        result.examples.setdefault(outcome.failure.kind, outcome.failure.message)


async def _look(server: Server, client: Client, result: Soak, end: float) -> None:
    """Note how the server is, until the time is over."""
    begin = time.perf_counter()
    while time.perf_counter() < end:
        metrics = await asyncio.to_thread(server.metrics)
        result.looks.append(
            Look(
                seconds=time.perf_counter() - begin,
                memory_bytes=int(metrics["firstlight_device_reserved_bytes"]) or _engine_resident_bytes(server.pid),
                running=int(_sum(metrics, "firstlight_requests_running")),
                pages_used=int(metrics["firstlight_pages_used"]),
                tokens=client.tokens_seen,
            )
        )
        await asyncio.sleep(LOOK_SECONDS)


def _engine_resident_bytes(server_pid: int) -> int:
    """Resident memory of the engine process, the server's child."""
    [child] = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{child}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _sum(metrics: dict[str, float], name: str, **labels: str) -> float:
    """Over all series of a metric that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for key, value in metrics.items()
        if re.fullmatch(rf"{name}(\{{.*\}})?", key) and all(one in key for one in wanted)
    )


def _when_quiet(server: Server) -> dict[str, float]:
    """The metrics once nothing runs or waits, or too much time has passed."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        metrics = server.metrics()
        busy = _sum(metrics, "firstlight_requests_running") + _sum(metrics, "firstlight_requests_waiting")
        if not busy or time.monotonic() > deadline:
            return metrics
        time.sleep(0.2)


def verdicts(
    result: Soak, metrics: dict[str, float], log: str, *, cached: bool, growth_mib: float, stall_seconds: float
) -> dict[str, str]:
    """What is wrong, by what was looked at; empty if nothing is."""
    wrong: dict[str, str] = {}
    if result.failures:
        wrong["requests"] = f"failed: {dict(result.failures)}; {result.examples}"
    if result.wrong_lengths:
        wrong["lengths"] = f"{result.wrong_lengths} answers had another number of tokens than was asked for"
    if not result.ways["whole"] or len(result.ways) < 2:
        wrong["load"] = f"it was no soak: {dict(result.ways)}"
    counted = int(_sum(metrics, "firstlight_requests_total"))
    aborted = int(_sum(metrics, "firstlight_requests_total", outcome="abort"))
    given_up = result.sent - result.ways["whole"] - sum(result.failures.values())
    if not result.sent - result.silent <= counted <= result.sent:
        wrong["requests counted"] = (
            f"{result.sent} were sent ({result.silent} of them given up before a token), the server counts {counted}"
        )
    if aborted > given_up:
        wrong["aborts"] = f"{given_up} were given up, the server counts {aborted}"
    for name in ("running", "waiting"):
        if left := int(_sum(metrics, f"firstlight_requests_{name}")):
            wrong[name] = f"{left} requests in the end"
    for name in ("pages", "slots"):
        if not cached and (used := int(metrics[f"firstlight_{name}_used"])):
            wrong[name] = f"{used} in use in the end, of {int(metrics[f'firstlight_{name}_capacity'])}"
    settled = result.looks[len(result.looks) // 10 :]
    memory = [look.memory_bytes for look in settled]
    if metrics["firstlight_device_reserved_bytes"]:
        if len(set(memory)) > 1:
            wrong["memory"] = f"reserved from {min(memory):,} to {max(memory):,} bytes; it must be constant"
        if retries := int(metrics["firstlight_allocator_retries_total"]):
            wrong["allocator"] = f"it had to give memory back {retries} times"
    elif memory and memory[-1] - memory[0] > growth_mib * 2**20:
        wrong["memory"] = f"the engine grew from {memory[0] / 2**20:.1f} to {memory[-1] / 2**20:.1f} MiB"
    if (stalled := longest_stall(result.looks)) > stall_seconds:
        wrong["stall"] = f"no token for {stalled:.1f} s while requests ran"
    if errors := [line for line in log.splitlines() if re.search(r"ERROR|Traceback|don't add up", line)]:
        wrong["log"] = f"{len(errors)} lines, first: {errors[0]}"
    return wrong


def longest_stall(looks: list[Look]) -> float:
    """Seconds between two looks with requests running at both, and no token at any client between them."""
    longest, since = 0.0, None
    for before, after in itertools.pairwise(looks):
        if before.running and after.running and after.tokens == before.tokens:
            since = before.seconds if since is None else since
            longest = max(longest, after.seconds - since)
        else:
            since = None
    return longest


def main() -> None:
    """Serve, soak, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", choices=("auto", "random"), default="auto")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--longest-prompt", type=int, default=4096)
    parser.add_argument("--longest-answer", type=int, default=256)
    parser.add_argument("--growth-mib", type=float, default=64)
    parser.add_argument("--stall-seconds", type=float, default=10)
    parser.add_argument("--server-option", action="append", default=[], metavar="OPTION", help="e.g. --no-prefix-cache")
    parser.add_argument("--ready-seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    context = arguments.longest_prompt + arguments.longest_answer
    options = [arguments.model, "--weights", arguments.weights, "--max-context", str(context), *arguments.server_option]
    with firstlight_server(options, arguments.ready_seconds) as server:
        print(f"ready after {server.start_seconds:.1f} s", file=sys.stderr)
        result, metrics = asyncio.run(
            soak(
                server,
                arguments.seconds,
                arguments.at_once,
                arguments.longest_prompt,
                arguments.longest_answer,
                arguments.seed,
            )
        )
        time.sleep(0.5)  # for the log's last line
        log = server.log.read_text(errors="replace")
    wrong = verdicts(
        result,
        metrics,
        log,
        cached="--no-prefix-cache" not in arguments.server_option,
        growth_mib=arguments.growth_mib,
        stall_seconds=arguments.stall_seconds,
    )
    memory = [look.memory_bytes for look in result.looks]
    record: dict[str, Any] = {
        "seconds": arguments.seconds,
        "at_once": arguments.at_once,
        "sent": result.sent,
        "ended": dict(result.ways),
        "failures": dict(result.failures),
        "generated_tokens_read": result.looks[-1].tokens if result.looks else 0,
        "memory_bytes": {"first": memory[0], "least": min(memory), "most": max(memory), "last": memory[-1]},
        "preemptions": metrics["firstlight_preemptions_total"],
        "evicted_tokens": metrics["firstlight_prefix_evicted_tokens_total"],
        "longest_stall_seconds": longest_stall(result.looks),
        "wrong": wrong,
    }
    print(json.dumps(record, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
