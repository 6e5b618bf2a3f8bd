"""Figures from hand-made notes, each worked out by hand."""

from __future__ import annotations

from array import array

import pytest

from firstlight.bench.errors import BenchError
from firstlight.bench.load import Run
from firstlight.bench.metrics import PERCENTILES, Distribution, is_good, parse_slo, summarise
from firstlight.bench.outcome import Failure, Outcome
from firstlight.bench.report import as_json, warnings
from firstlight.config import BenchOptions


def outcome(number: int, sent: float, times: list[float], tokens: int | None = None, **more: object) -> Outcome:
    """An answered request whose chunks came at `times`."""
    return Outcome(
        number,
        0,
        asked_input=10,
        asked_output=len(times) if tokens is None else tokens,
        sent=sent,
        chunk_times=array("d", times),
        ended=times[-1],
        input_tokens=10,
        output_tokens=len(times) if tokens is None else tokens,
        **more,  # type: ignore[arg-type]
    )


def test_every_figure_of_two_requests() -> None:
    # Sent at 100 and 101: first tokens after 1.0 and 2.0 s; then gaps of 0.5, 0.5 and of 1.0.
    run = Run(
        [outcome(0, 100.0, [101.0, 101.5, 102.0]), outcome(1, 101.0, [103.0, 104.0])],
        bound=2,
        began=100.0,
        seconds=4.0,
        cpu_seconds=1.0,
    )
    summary = summarise(run)
    latencies = summary.latencies
    assert (summary.completed, summary.failed, summary.input_tokens, summary.output_tokens) == (2, 0, 20, 5)
    assert (summary.request_rate, summary.output_rate, summary.total_rate) == (0.5, 1.25, 6.25)
    assert (latencies.ttft.mean, latencies.ttft.median, latencies.ttft.std) == (1.5, 1.5, 0.5)
    assert (latencies.tpot.mean, latencies.tpot.median) == (0.75, 0.75)  # 0.5 and 1.0: one value a request
    assert latencies.itl.count == 3
    assert latencies.itl.mean == pytest.approx(2 / 3)  # 0.5, 0.5, 1.0: one value a chunk
    assert latencies.itl.median == 0.5
    assert (latencies.e2el.mean, latencies.e2el.median) == (2.5, 2.5)
    # Linear interpolation between 1.0 and 2.0.
    assert latencies.ttft.percentiles == pytest.approx([1 + percent / 100 for percent in PERCENTILES])
    assert summary.peak_running == 2
    assert summary.client_share == 0.25
    assert warnings(summary) == []


def test_several_tokens_a_chunk_change_tpot_and_not_itl() -> None:
    latencies = summarise(Run([outcome(0, 0.0, [1.0, 2.0, 3.0], tokens=9)], 1, 0.0, 3.0, 0.0)).latencies
    assert latencies.tpot.mean == 2 / 8
    assert latencies.itl.mean == 1.0


def test_an_answer_of_one_token_has_no_tpot() -> None:
    summary = summarise(Run([outcome(0, 0.0, [1.0])], 1, 0.0, 1.0, 0.0), parse_slo(["tpot=1"]))
    assert summary.latencies.tpot == Distribution.of([])
    assert summary.latencies.itl.count == 0
    assert summary.good == 1


def test_failures_are_counted_by_kind_and_mixed_into_nothing() -> None:
    cut = outcome(1, 0.0, [0.5, 9.0])
    cut.failure = Failure("cut_off", "after 2 chunks")
    lost = [Outcome(number, 0, 10, 5, failure=Failure("connection", f"refused {number}")) for number in (2, 3)]
    summary = summarise(Run([outcome(0, 0.0, [1.0, 2.0]), cut, *lost], 4, 0.0, 10.0, 0.0))
    assert (summary.completed, summary.failed, summary.failed_chunks) == (1, 3, 2)
    assert {kind: one.count for kind, one in summary.failures.items()} == {"connection": 2, "cut_off": 1}
    assert list(summary.failures) == ["connection", "cut_off"]  # the commonest first
    assert summary.failures["connection"].example == "refused 2"
    assert summary.output_tokens == 2
    assert summary.latencies.ttft.count == 1
    assert any("refused 2" in line for line in warnings(summary))


def test_all_failed() -> None:
    summary = summarise(Run([Outcome(0, 0, 10, 5, failure=Failure("timeout", "late"))], 1, 0.0, 2.0, 0.0))
    assert (summary.completed, summary.failed, summary.total_rate) == (0, 1, 0.0)
    assert summary.latencies.e2el.count == 0


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        (["ttft=1000"], True),
        (["ttft=999"], False),
        (["tpot=500"], True),
        (["tpot=499"], False),
        (["e2el=2000"], True),
        (["e2el=1999"], False),
        (["ttft=1000", "tpot=499"], False),
    ],
)
def test_goodput_at_the_edge(objectives: list[str], good: bool) -> None:
    one = outcome(0, 100.0, [101.0, 101.5, 102.0])
    assert is_good(one, parse_slo(objectives)) is good
    assert summarise(Run([one], 1, 0.0, 2.0, 0.0), parse_slo(objectives)).good == int(good)


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=fast", "ttft=-1", "itl=5", "ttft=nan"])
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="NAME=MILLISECONDS"):
        parse_slo([text])


def test_counts_come_from_usage_else_from_ids_else_from_chunks() -> None:
    one = outcome(0, 0.0, [1.0, 2.0])
    assert (one.generated, one.counted_by) == (2, "usage")
    one.output_tokens, one.told_ids = None, 7
    assert (one.generated, one.counted_by) == (7, "token_ids")
    one.told_ids = None
    assert (one.generated, one.counted_by) == (2, "chunks")
    summary = summarise(Run([one], 1, 0.0, 2.0, 0.0))
    assert any("chunks were counted as tokens" in line for line in warnings(summary))


def test_lengths_unlike_those_asked_for_are_told() -> None:
    one = outcome(0, 0.0, [1.0, 2.0])
    one.asked_output = 5
    summary = summarise(Run([one], 1, 0.0, 2.0, 0.0))
    assert summary.unlike_asked == 1
    assert any("another number of tokens" in line for line in warnings(summary))


def test_arrivals_that_were_sent_late_are_told() -> None:
    run = Run([outcome(0, 1.0, [2.0], due=0.9), outcome(1, 3.0, [4.0], due=3.0)], None, 0.0, 4.0, 0.0)
    summary = summarise(run)
    assert summary.sent_late == 1
    assert summary.late is not None
    assert summary.late.mean == pytest.approx(0.05)


def test_requests_that_only_touch_do_not_run_at_once() -> None:
    run = Run([outcome(0, 0.0, [1.0]), outcome(1, 1.0, [2.0]), outcome(2, 1.5, [3.0])], 1, 0.0, 3.0, 0.0)
    assert summarise(run).peak_running == 2


def test_turns_have_figures_of_their_own() -> None:
    first, second = outcome(0, 0.0, [1.0, 2.0]), outcome(0, 3.0, [3.5, 4.0])
    second.turn = 1
    summary = summarise(Run([first, second], 1, 0.0, 4.0, 0.0))
    assert [turn.ttft.mean for turn in summary.turns] == [1.0, 0.5]


INFERENCEX = [
    "date",
    "backend",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
]
"""What InferenceX's benchmark_serving writes, beside the latencies."""


def test_the_json_has_the_names_that_other_tools_read() -> None:
    run = Run([outcome(0, 100.0, [101.0, 101.5, 102.0]), outcome(1, 101.0, [103.0, 104.0])], 2, 100.0, 4.0, 1.0)
    options = BenchOptions(concurrency=2, gpus=2, api_key="secret")
    report = as_json(options, {"id": "m"}, run, summarise(run), detailed=True)
    assert set(INFERENCEX) <= report.keys()
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p90", "p99", "p99.9")} <= report.keys()
    assert report["mean_ttft_ms"] == 1500.0
    assert report["median_tpot_ms"] == 750.0
    assert (report["conc"], report["tput_per_gpu"], report["output_tput_per_gpu"]) == (2, 3.125, 0.625)
    assert report["median_intvty"] == pytest.approx(1000 / 750)
    assert report["request_rate"] == "inf"
    assert report["start_times"] == [0.0, 1.0]
    assert report["ttfts"] == [1.0, 2.0]
    assert report["itls"] == [[0.5, 0.5], [1.0]]
    assert report["input_lens"] == [10, 10]
    assert "secret" not in str(report)
    assert not {"ttfts", "itls"} & as_json(options, {"id": "m"}, run, summarise(run), detailed=False).keys()
