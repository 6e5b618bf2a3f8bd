"""A model served on this machine, measured through HTTP as its users see it.

    python benchmarks/served.py MODEL [--weights random] [--parts closed long] [--at-once 1 16 100 fit] [--json served.json]

Starts `firstlight serve` once, with the prefix cache off, and puts loads of `firstlight bench` on it: prompts of random token
ids, answers that ignore stop tokens, temperature 1 (greedy answers of random weights repeat a token, and so keep to few
experts).

`closed`: a closed loop for each number of requests at once: `--requests-each` times as many requests (4), all of
`--input-tokens` and `--output-tokens`; total tokens/s = (prompt + generated tokens) / wall time. `fit` is as many as the
caches hold to their ends, at most --max-running.

`long`: one prompt of 131,072 tokens alone; then 32 requests of 256 tokens decode by themselves, and while they go on, such a
prompt arrives. Its time to first token alone and beside them, and how long they waited between tokens without it and with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from serving import Server, firstlight_server

from firstlight.bench.bench import Result, bench
from firstlight.bench.client import Client
from firstlight.bench.outcome import Outcome
from firstlight.config import BenchOptions

SHORT_REQUESTS, SHORT_PROMPT, LONG_PROMPT, LONG_ANSWER = 32, 256, 131_072, 16
QUIET_SECONDS = 2.0
"""At least this long the short requests are watched by themselves."""
SETTLE_TOKENS = 32
"""Of each short request, before the long one arrives; and after the window, so that none ends in it."""


def closed_loop(
    server: Server, at_once: int, input_tokens: int, output_tokens: int, requests: int, token_range: str | None = None
) -> dict[str, Any]:
    """One closed loop: the report of `firstlight bench`."""
    given = {
        "url": server.url,
        "concurrency": at_once,
        "requests": requests,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "warm_up": min(at_once, 4),
        "temperature": 1.0,
        "return_token_ids": True,
        "token_range": token_range,
        "timeout_seconds": 3600,
    }
    result: Result = asyncio.run(bench(BenchOptions.load(given, {})))
    report = result.as_json()
    report["at_once"] = at_once
    return report


def fitting(server: Server, tokens: int, max_running: int) -> int:
    """Requests of so many tokens that the caches hold at the same time."""
    metrics = server.metrics()
    fit = int(metrics["firstlight_pages_capacity"]) // -(-tokens // int(metrics["firstlight_page_size"]))
    if slots := int(metrics["firstlight_slots_capacity"]):
        fit = min(fit, slots)
    return max(min(fit, max_running), 1)


def table(reports: list[dict[str, Any]]) -> str:
    """The closed loops as Markdown."""
    header = [
        "at once",
        "requests",
        "failed",
        "total tok/s",
        "output tok/s",
        "TTFT ms",
        "p99",
        "TPOT ms",
        "p99",
        "wall s",
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for one in reports:
        cells = [
            f"{one['at_once']}",
            f"{one['completed']}",
            f"{one['failed']}",
            f"{one['total_token_throughput']:,.0f}",
            f"{one['output_throughput']:,.0f}",
            *(f"{one[f'{kind}_{name}_ms']:,.2f}" for name in ("ttft", "tpot") for kind in ("median", "p99")),
            f"{one['duration']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# Long beside short


async def long_beside_short(
    server: Server, short: int, short_prompt: int, long_prompt: int, seed: int
) -> dict[str, Any]:
    """The scenario; times in ms. Raises RuntimeError when a request fails."""
    options = BenchOptions(url=server.url, temperature=1.0, return_token_ids=True, timeout_seconds=3600)
    rng = np.random.default_rng(seed)
    async with Client(options) as client:
        await client.find_model()
        vocabulary = int(client.model["vocab_size"])
        room = int(client.model["max_model_len"])
        if long_prompt + LONG_ANSWER > room:
            sys.exit(
                f"the longest request has {room} tokens; the scenario needs --max-context {long_prompt + LONG_ANSWER}"
            )

        def prompt(tokens: int) -> dict[str, Any]:
            return {"prompt": rng.integers(0, vocabulary, tokens).tolist()}

        async def ask(tokens: int, answer: int) -> Outcome:
            outcome = Outcome(0, 0, tokens, answer)
            await client.ask(prompt(tokens), outcome)
            if outcome.failure is not None:
                raise RuntimeError(f"a request failed: {outcome.failure.kind}: {outcome.failure.message}")
            return outcome

        await ask(long_prompt, 1)  # warm-up
        alone = await ask(long_prompt, LONG_ANSWER)

        # The short ones decode for as long as anybody looks, and are hung up on then.
        answer = room - short_prompt
        outcomes = [Outcome(number, 0, short_prompt, answer) for number in range(short)]
        running = [asyncio.create_task(client.ask(prompt(short_prompt), outcome)) for outcome in outcomes]
        try:
            await _settled(outcomes, running)
            before = time.perf_counter()
            await asyncio.sleep(max(alone.ttft, QUIET_SECONDS))
            begin = time.perf_counter()
            beside = await ask(long_prompt, LONG_ANSWER)
            first = beside.chunk_times[0]
            await _settled(outcomes, running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    quiet = _gaps(outcomes, before, begin)
    busy = _gaps(outcomes, beside.sent, first)
    return {
        "short_requests": short,
        "short_prompt_tokens": short_prompt,
        "long_prompt_tokens": long_prompt,
        "long_ttft_alone_ms": alone.ttft * 1e3,
        "long_ttft_beside_ms": beside.ttft * 1e3,
        **_itl("without", quiet),
        **_itl("with", busy),
        "short_output_tok_s_without": len(quiet) / (begin - before),
        "short_output_tok_s_with": len(busy) / (first - beside.sent),
    }


async def _settled(outcomes: list[Outcome], running: list[asyncio.Task[None]]) -> None:
    """Wait until each has SETTLE_TOKENS more. Raises RuntimeError when one ends."""
    wanted = [len(outcome.chunk_times) + SETTLE_TOKENS for outcome in outcomes]
    while any(len(outcome.chunk_times) < count for outcome, count in zip(outcomes, wanted, strict=True)):
        if any(task.done() for task in running):
            said = [outcome.failure.message for outcome in outcomes if outcome.failure is not None]
            raise RuntimeError(f"a short request ended too early: {said[0] if said else 'its context is full'}")
        await asyncio.sleep(0.01)


def _gaps(outcomes: list[Outcome], begin: float, end: float) -> array[float]:
    """Times between tokens that came from `begin` to `end`, of all requests; a gap that began earlier counts whole."""
    gaps = array("d")
    for outcome in outcomes:
        times = np.frombuffer(outcome.chunk_times)
        gaps.extend(np.diff(times)[(times[1:] >= begin) & (times[1:] <= end)])
    return gaps


def _itl(name: str, gaps: array[float]) -> dict[str, float]:
    values = np.array(gaps) * 1e3
    percentiles = np.percentile(values, [50, 99, 100]) if len(values) else [float("nan")] * 3
    return {
        f"short_itl_{kind}_{name}_ms": float(value)
        for kind, value in zip(("p50", "p99", "max"), percentiles, strict=True)
    }


def main() -> None:
    """Serve, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", choices=("auto", "random"), default="auto")
    parser.add_argument("--parts", nargs="+", choices=("closed", "long"), default=["closed"])
    parser.add_argument("--at-once", nargs="+", default=["1", "16", "100", "fit"], help="numbers, or `fit`")
    parser.add_argument("--input-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=1024)
    parser.add_argument("--requests-each", type=int, default=4, help="requests, as a multiple of those at once")
    parser.add_argument("--token-range", help="random prompts have ids of LOW-HIGH; default: the whole vocabulary")
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument(
        "--server-option", action="append", default=[], metavar="OPTION", help="e.g. --step-tokens=8192"
    )
    parser.add_argument("--ready-seconds", type=float, default=300)
    parser.add_argument("--short-requests", type=int, default=SHORT_REQUESTS)
    parser.add_argument("--long-prompt", type=int, default=LONG_PROMPT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    longest = arguments.input_tokens + arguments.output_tokens
    context = max(
        longest if "closed" in arguments.parts else 0,
        arguments.long_prompt + LONG_ANSWER if "long" in arguments.parts else 0,
    )
    options = [arguments.model, "--weights", arguments.weights, "--no-prefix-cache", "--max-context", str(context)]
    options += ["--max-running", str(arguments.max_running)]
    record: dict[str, Any] = {"model": arguments.model, "server_options": [*options[1:], *arguments.server_option]}
    with firstlight_server([*options, *arguments.server_option], arguments.ready_seconds) as server:
        record["start_seconds"] = server.start_seconds
        print(f"ready after {server.start_seconds:.1f} s", file=sys.stderr)
        if "closed" in arguments.parts:
            record["closed_loops"] = []
            fit = fitting(server, longest, arguments.max_running)
            for text in arguments.at_once:
                at_once = fit if text == "fit" else int(text)
                record["closed_loops"].append(
                    closed_loop(
                        server,
                        at_once,
                        arguments.input_tokens,
                        arguments.output_tokens,
                        arguments.requests_each * at_once,
                        arguments.token_range,
                    )
                )
                print(table(record["closed_loops"][-1:]).splitlines()[-1], file=sys.stderr, flush=True)
                if arguments.json:  # what is measured stays, whatever comes next
                    arguments.json.write_text(json.dumps(record, indent=1))
            print(table(record["closed_loops"]))
        if "long" in arguments.parts:
            found = asyncio.run(
                long_beside_short(server, arguments.short_requests, SHORT_PROMPT, arguments.long_prompt, arguments.seed)
            )
            record["long_beside_short"] = found
            for name, value in found.items():
                print(f"{name}: {value:,.2f}" if isinstance(value, float) else f"{name}: {value:,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
