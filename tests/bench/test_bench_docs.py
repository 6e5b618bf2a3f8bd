"""docs/bench.md says what the code does."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

from firstlight.bench.load import Run
from firstlight.bench.metrics import summarise
from firstlight.bench.outcome import FAILURES, Outcome
from firstlight.bench.report import DEFINITIONS, as_json
from firstlight.config import BenchOptions

DOCUMENT = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
NAMES = set(re.findall(r"`([^`\n]+)`", DOCUMENT))


def test_every_figure_of_the_json_is_documented() -> None:
    one = Outcome(0, 0, 1, 2, sent=0.0, chunk_times=array("d", [1.0, 2.0]), ended=2.0)
    run = Run([one], 1, 0.0, 2.0, 0.0)
    report = as_json(BenchOptions(), {"id": "m"}, run, summarise(run), detailed=True)
    latency = re.compile(r"(mean_|median_|std_|p[\d.]+_)(\w+)")
    for name in report:
        found = latency.fullmatch(name)
        if found and found[2] != "intvty":
            assert {found[1], found[2]} <= NAMES, name
        elif not found:
            assert name in NAMES, name
    assert set(DEFINITIONS) <= report.keys() | {"ttft", "tpot", "itl", "e2el"}


def test_every_kind_of_failure_is_documented() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", DOCUMENT.partition("<!-- failures -->")[2], re.MULTILINE))
    assert {kind: text.replace("`", "") for kind, text in rows.items()} == FAILURES


def test_every_option_that_it_names_exists() -> None:
    options = set(re.findall(r"--([a-z][a-z-]*)", DOCUMENT.partition("## Whether it is right")[0]))
    known = {name.replace("_", "-") for name in BenchOptions.model_fields} | {"json", "details"}
    assert options - known == set()
