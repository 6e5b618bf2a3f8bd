"""Figures for people and for programs.

The JSON has the names that vLLM's `bench serve` and InferenceX's benchmark_serving give them, in their units (ms), so
that scripts made for those read it; what they don't have stands beside them.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table

from firstlight.bench.load import Run
from firstlight.bench.metrics import LATE_SECONDS, PERCENTILES, Distribution, Latencies, Summary
from firstlight.config import BenchOptions

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
DEFINITIONS = {
    "ttft": "from sending the request to its first chunk with a token",
    "tpot": "(end - first token) / (tokens - 1), one value a request; requests of one token have none",
    "itl": "between two chunks with tokens, one value a chunk after the first",
    "e2el": "from sending the request to the last piece of its answer",
    "total_token_throughput": "(prompt + generated tokens of answered requests) / duration",
    "duration": "from the start to the end of the last answer, failures included",
}
BUSY_SHARE = 0.7
"""A client that takes more of a core than this adds its own delays to the server's."""


def as_json(options: BenchOptions, model: dict[str, Any], run: Run, summary: Summary, detailed: bool) -> dict[str, Any]:
    """The report. detailed: with lists that have an entry for each request, failed ones included."""
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if options.endpoint == "chat" else "openai",
        "model_id": model.get("id"),
        "tokenizer_id": options.tokenizer,
        "num_prompts": summary.completed + summary.failed,
        "request_rate": options.rate or "inf",
        "burstiness": options.burstiness,
        "max_concurrency": run.bound,
        "duration": summary.seconds,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_rate,
        "request_goodput": None if summary.good is None else summary.good / summary.seconds,
        "output_throughput": summary.output_rate,
        "total_token_throughput": summary.total_rate,
        "max_concurrent_requests": summary.peak_running,
        **_milliseconds(summary.latencies),
        **_by_gpu(options, run, summary),
        "cached_input_tokens": summary.cached_tokens,
        "failures": {kind: {"count": one.count, "example": one.example} for kind, one in summary.failures.items()},
        "failed_chunks": summary.failed_chunks,
        "output_tokens_unlike_asked": summary.unlike_asked,
        "tokens_counted_by": summary.counted_by,
        "sent_late": summary.sent_late,
        "late_ms": None if summary.late is None else dict(_figures(summary.late, "late")),
        "turns": [_milliseconds(turn) for turn in summary.turns],
        "client_cpu_share": summary.client_share,
        "definitions": DEFINITIONS,
        "options": {name: _plain(value) for name, value in options if name != "api_key"},
        "client": {
            "firstlight": _version(),
            "aiohttp": metadata.version("aiohttp"),
            "python": platform.python_version(),
        },
    }
    return {**report, **_details(run)} if detailed else report


def _version() -> str | None:
    """Of the installed package; None when the source runs without being installed."""
    try:
        return metadata.version("firstlight")
    except metadata.PackageNotFoundError:
        return None


def _milliseconds(latencies: Latencies) -> dict[str, float]:
    return {key: value for name in LATENCIES for key, value in _figures(getattr(latencies, name), name)}


def _figures(one: Distribution, name: str) -> Iterator[tuple[str, float]]:
    yield f"mean_{name}_ms", one.mean * 1e3
    yield f"median_{name}_ms", one.median * 1e3
    yield f"std_{name}_ms", one.std * 1e3
    for percent, value in zip(PERCENTILES, one.percentiles, strict=True):
        yield f"p{percent:g}_{name}_ms", value * 1e3


def _by_gpu(options: BenchOptions, run: Run, summary: Summary) -> dict[str, Any]:
    """What InferenceX derives: rates by GPU, and interactivity, the tokens a second that one user sees."""
    figures: dict[str, Any] = {
        "conc": run.bound,
        "gpus": options.gpus,
        "tput_per_gpu": summary.total_rate / options.gpus,
        "output_tput_per_gpu": summary.output_rate / options.gpus,
        "input_tput_per_gpu": (summary.total_rate - summary.output_rate) / options.gpus,
    }
    for key, value in _figures(summary.latencies.tpot, "tpot"):
        if not key.startswith("std"):
            figures[key.replace("tpot_ms", "intvty")] = 1e3 / value if value else None
    return figures


def _details(run: Run) -> dict[str, list[Any]]:
    outcomes = run.outcomes
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.generated if outcome.failure is None else 0 for outcome in outcomes],
        "start_times": [outcome.sent - run.began if outcome.sent else None for outcome in outcomes],
        "ttfts": [outcome.ttft if outcome.chunk_times else None for outcome in outcomes],
        "itls": [
            [after - before for before, after in zip(outcome.chunk_times, outcome.chunk_times[1:], strict=False)]
            for outcome in outcomes
        ],
        "e2els": [outcome.e2el if outcome.failure is None else None for outcome in outcomes],
        "errors": ["" if outcome.failure is None else str(outcome.failure.message) for outcome in outcomes],
        "error_kinds": [None if outcome.failure is None else outcome.failure.kind for outcome in outcomes],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool, type(None))):
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)
    return list(value) if isinstance(value, tuple) else str(value)


def show(console: Console, options: BenchOptions, summary: Summary) -> None:
    """Print the figures, and whatever makes them less than they seem."""
    console.print(_overview(options, summary))
    console.print(_latency_table(summary.latencies, "all requests"))
    for number, turn in enumerate(summary.turns):
        console.print(_latency_table(turn, f"turn {number + 1} of each conversation"))
    for line in warnings(summary):
        console.print(f"note: {line}", markup=False, highlight=False)


def _overview(options: BenchOptions, summary: Summary) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")

    def row(name: str, value: str) -> None:
        table.add_row(name, value)

    row("answered requests", f"{summary.completed:,}")
    row("failed requests", f"{summary.failed:,}")
    for kind, one in summary.failures.items():
        row(f"  {kind}", f"{one.count:,}")
    row("duration, s", f"{summary.seconds:,.2f}")
    row("prompt tokens", f"{summary.input_tokens:,}")
    if summary.cached_tokens:
        row("  of them cached", f"{summary.cached_tokens:,}")
    row("generated tokens", f"{summary.output_tokens:,}")
    row("requests/s", f"{summary.request_rate:,.3f}")
    if summary.good is not None:
        row("  good ones (" + ", ".join(options.slo) + ")", f"{summary.good / summary.seconds:,.3f}")
    row("generated tokens/s", f"{summary.output_rate:,.1f}")
    row("total tokens/s", f"{summary.total_rate:,.1f}")
    row("requests at once, at most", f"{summary.peak_running:,}")
    row("this client's CPU, of one core", f"{summary.client_share:.0%}")
    return table


def _latency_table(latencies: Latencies, title: str) -> Table:
    table = Table("ms", "mean", "std", "median", *(f"p{percent:g}" for percent in PERCENTILES), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, meaning in LATENCIES.items():
        one: Distribution = getattr(latencies, name)
        values = (one.mean, one.std, one.median, *one.percentiles)
        table.add_row(f"{name.upper()}, {meaning}", *(f"{value * 1e3:,.2f}" if one.count else "-" for value in values))
    return table


def warnings(summary: Summary) -> list[str]:
    """What a reader of the figures must know."""
    lines = [f"{kind}, first of {one.count:,}: {one.example}" for kind, one in summary.failures.items()]
    if summary.unlike_asked:
        lines.append(f"{summary.unlike_asked:,} answers have another number of tokens than was asked for")
    if guessed := summary.counted_by.get("chunks", 0):
        lines.append(
            f"{guessed:,} answers came without `usage` or token ids: their chunks were counted as tokens, which is too few "
            "if a chunk has several"
        )
    if summary.sent_late:
        lines.append(
            f"{summary.sent_late:,} requests were sent more than {LATE_SECONDS * 1e3:g} ms after their time: "
            "--concurrency, or this client, held them up"
        )
    if summary.client_share > BUSY_SHARE:
        lines.append(f"this client took {summary.client_share:.0%} of a core: latencies may be its own")
    return lines
