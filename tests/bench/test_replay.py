"""benchmarks/replay_server.py: what was recorded comes again, in bytes and times."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from bench.conftest import Paced, in_a_thread

from firstlight.bench.bench import bench
from firstlight.config import BenchOptions

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from replay_server import create_app, record

FIRST, GAP, LATE = 0.4, 0.1, 0.3


def test_a_recording_is_played_again(paced_server: Callable[[float, float], Paced], tmp_path: Path) -> None:
    lines = [{"prompt": f"prompt {number}", "output_tokens": 3 + number} for number in range(3)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recording = asyncio.run(record(paced_server(FIRST, GAP).url, "paced", lines, at_once=2))
    for line in lines:
        answer = recording["answers"][line["prompt"]]
        assert FIRST <= answer[0][0] <= FIRST + LATE
        sent = "".join(data for _, data in answer)
        assert sent.count('"token_ids"') == line["output_tokens"]
        assert sent.endswith("data: [DONE]\n\n")
    with in_a_thread(create_app(json.loads(json.dumps(recording)))) as server:
        options = BenchOptions(url=server.url, trace=str(trace), concurrency=3, warm_up=0)
        summary = asyncio.run(bench(options)).summary
    assert (summary.completed, summary.output_tokens, summary.unlike_asked) == (3, 12, 0)
    assert FIRST <= summary.latencies.ttft.median <= FIRST + 2 * LATE
    assert abs(summary.latencies.tpot.median - GAP) < GAP / 2
