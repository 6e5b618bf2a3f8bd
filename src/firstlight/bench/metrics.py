"""From the notes of many requests to figures. docs/bench.md defines each; a test holds the two together.

Figures are of requests that were answered whole; failures are counted beside them by kind, never mixed in.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from firstlight.bench.errors import BenchError
from firstlight.bench.load import Run
from firstlight.bench.outcome import CountedBy, Outcome

PERCENTILES = (75.0, 90.0, 95.0, 99.0, 99.9)
SLO_NAMES = ("ttft", "tpot", "e2el")
LATE_SECONDS = 0.01
"""An arrival that was sent this much after its time was held up by the client or by --concurrency."""


@dataclass(frozen=True)
class Distribution:
    """Of `count` values, in seconds. percentiles: by PERCENTILES, interpolated linearly. All 0 if there is no value."""

    count: int
    mean: float
    std: float
    median: float
    percentiles: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """The distribution of some values."""
        array = np.fromiter(values, np.float64)
        if not len(array):
            return cls(0, 0.0, 0.0, 0.0, (0.0,) * len(PERCENTILES))
        percentiles = np.percentile(array, PERCENTILES)
        return cls(
            len(array), float(array.mean()), float(array.std()), float(np.median(array)), tuple(map(float, percentiles))
        )


@dataclass(frozen=True)
class FailureCount:
    """Failures of one kind, and what the first of them said."""

    count: int
    example: str


@dataclass(frozen=True)
class Latencies:
    """The four latencies of some requests."""

    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Latencies:
        """Of requests that were answered whole."""
        gaps = [np.diff(np.frombuffer(outcome.chunk_times)) for outcome in outcomes]
        return cls(
            ttft=Distribution.of(outcome.ttft for outcome in outcomes),
            tpot=Distribution.of(outcome.tpot for outcome in outcomes if outcome.tpot is not None),
            itl=Distribution.of(np.concatenate(gaps) if gaps else ()),
            e2el=Distribution.of(outcome.e2el for outcome in outcomes),
        )


@dataclass(frozen=True)
class Summary:
    """The figures of a run. Rates are by second of `seconds`, the time from the start to the end of the last answer.

    unlike_asked: answers whose number of tokens is not the one asked for. counted_by: requests by what their number of
    generated tokens rests on. good: requests that kept every objective; None without any. peak_running: requests that ran
    at the same moment, at most. late: how long after their time arrivals were sent; of open loops alone.
    client_share: of one core, what this client took.
    """

    seconds: float
    completed: int
    failed: int
    failures: dict[str, FailureCount]
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    failed_chunks: int
    unlike_asked: int
    counted_by: dict[CountedBy, int]
    good: int | None
    peak_running: int
    latencies: Latencies
    turns: tuple[Latencies, ...]
    late: Distribution | None
    sent_late: int
    client_share: float

    @property
    def request_rate(self) -> float:
        """Requests answered a second."""
        return self.completed / self.seconds

    @property
    def output_rate(self) -> float:
        """Generated tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Prompt and generated tokens a second."""
        return (self.input_tokens + self.output_tokens) / self.seconds


def parse_slo(texts: Sequence[str]) -> dict[str, float]:
    """Objectives as {name: seconds}, from `NAME=MILLISECONDS`. Raises BenchError."""
    objectives = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if name not in SLO_NAMES or not milliseconds >= 0:
            raise BenchError(f"--slo {text}: it must be NAME=MILLISECONDS, with a name of {', '.join(SLO_NAMES)}")
        objectives[name] = milliseconds / 1e3
    return objectives


def is_good(outcome: Outcome, objectives: dict[str, float]) -> bool:
    """Whether an answered request kept every objective. An answer of one token has no TPOT that could be too long."""
    values = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.e2el}
    return all(values[name] <= limit for name, limit in objectives.items())


def summarise(run: Run, objectives: dict[str, float] | None = None) -> Summary:
    """The figures of a run. objectives: of `parse_slo`."""
    whole = [outcome for outcome in run.outcomes if outcome.failure is None]
    turns = max((outcome.turn for outcome in whole), default=0) + 1
    late = [outcome.sent - outcome.due for outcome in run.outcomes if outcome.due is not None]
    return Summary(
        seconds=run.seconds,
        completed=len(whole),
        failed=len(run.outcomes) - len(whole),
        failures=_failures(run.outcomes),
        input_tokens=sum(outcome.prompt_tokens for outcome in whole),
        output_tokens=sum(outcome.generated for outcome in whole),
        cached_tokens=sum(outcome.cached_tokens or 0 for outcome in whole),
        failed_chunks=sum(len(outcome.chunk_times) for outcome in run.outcomes if outcome.failure is not None),
        unlike_asked=sum(outcome.generated != outcome.asked_output for outcome in whole),
        counted_by=dict(Counter(outcome.counted_by for outcome in whole)),
        good=sum(is_good(outcome, objectives) for outcome in whole) if objectives else None,
        peak_running=_peak_running(whole),
        latencies=Latencies.of(whole),
        turns=tuple(Latencies.of([outcome for outcome in whole if outcome.turn == turn]) for turn in range(turns))
        if turns > 1
        else (),
        late=Distribution.of(late) if late else None,
        sent_late=sum(seconds > LATE_SECONDS for seconds in late),
        client_share=run.cpu_seconds / run.seconds if run.seconds else 0.0,
    )


def _failures(outcomes: Sequence[Outcome]) -> dict[str, FailureCount]:
    """By kind, the commonest first."""
    counts: dict[str, FailureCount] = {}
    for outcome in outcomes:
        if (failure := outcome.failure) is not None:
            known = counts.get(failure.kind, FailureCount(0, failure.message))
            counts[failure.kind] = dataclasses.replace(known, count=known.count + 1)
    return dict(sorted(counts.items(), key=lambda item: -item[1].count))


def _peak_running(outcomes: Sequence[Outcome]) -> int:
    """Requests between being sent and being answered at the same moment, at most. An end comes before a start."""
    moments = sorted([(outcome.sent, 1) for outcome in outcomes] + [(outcome.ended, -1) for outcome in outcomes])
    running = peak = 0
    for _, change in moments:
        running += change
        peak = max(peak, running)
    return peak
