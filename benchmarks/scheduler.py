"""What planning costs on the CPU: `plan()` + `commit()` of one step, with many requests running and many waiting.

    python benchmarks/scheduler.py [--running 256] [--waiting 2000] [--steps 2000]

The executor is nobody: each result is one token a row, made outside the timed region. Three loads: every running request
decodes (nothing joins or leaves); requests join and leave all the time (answers of 32 to 96 tokens, so that in each step
some end and others take their rows); and both with the state slots of a hybrid model. Times are CPU time of the thread,
garbage collection included; prints the median, the 99th percentile and the worst step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import numpy as np

from firstlight.config import EngineOptions
from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.plan import StepResult
from firstlight.scheduling.request import Request
from firstlight.scheduling.sampling import SamplingParams
from firstlight.scheduling.scheduler import Scheduler

PROMPT = 512  # tokens
BUDGET_MS = 1.0


def measure(running: int, waiting: int, steps: int, answer: int, slots: int, page_size: int) -> list[float]:
    """Seconds of plan + commit, for each of `steps` steps after all rows are taken."""
    longest = PROMPT + (2 * answer or steps + 1000)
    pages = running * -(-longest // page_size) + 4096
    geometry = CacheGeometry(page_size, pages, slots, slots // 2)
    options = EngineOptions(model="none", max_running=running, step_tokens=8192)
    scheduler = Scheduler(options, geometry, max_context=1 << 20)
    random = np.random.default_rng(0)
    submitted = 0

    def submit() -> None:
        nonlocal submitted
        prompt = random.integers(0, 100_000, PROMPT, dtype=np.int32)
        tokens = int(random.integers(answer // 2, answer * 3 // 2)) if answer else longest - PROMPT
        scheduler.submit(Request(str(submitted), prompt, SamplingParams(max_tokens=tokens)))
        submitted += 1

    for _ in range(running + waiting):
        submit()
    flights: deque[tuple] = deque()
    times: list[float] = []
    warm = 0
    while len(times) < steps:
        start = time.thread_time()
        plan = scheduler.plan()
        took = time.thread_time() - start
        assert plan is not None
        count = len(plan.sampling_rows)
        flights.append((plan, StepResult(np.full((count, 1), 17, np.int32), np.ones(count, np.int32))))
        if len(flights) < options.depth:
            continue
        start = time.thread_time()
        scheduler.commit(*flights.popleft())
        took += time.thread_time() - start
        warm += 1
        if warm > 500:
            times.append(took)
        while scheduler.waiting < waiting:
            submit()
    assert scheduler.metrics.preemptions == 0
    assert scheduler.running > 0.9 * running
    return times


def main() -> None:
    """Measures the loads and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="requests with a row (default: %(default)s)")
    parser.add_argument("--waiting", type=int, default=2000, help="requests in the queue (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="steps to time (default: %(default)s)")
    given = parser.parse_args()
    loads = {
        "decode, pages of 16": (0, 0, 16),
        "decode, pages of 1": (0, 0, 1),
        "decode, hybrid": (0, 2 * given.running, 16),
        "joins and leaves": (64, 0, 16),
        "joins and leaves, hybrid": (64, 2 * given.running, 16),
    }
    print(f"plan() + commit() at {given.running} running and {given.waiting} waiting, in ms (budget: {BUDGET_MS})")
    print(f"{'load':<30}{'median':>9}{'p99':>9}{'worst':>9}")
    for name, (answer, slots, page_size) in loads.items():
        times = sorted(measure(given.running, given.waiting, given.steps, answer, slots, page_size))
        p99 = times[int(0.99 * (len(times) - 1))]
        print(f"{name:<30}{1e3 * statistics.median(times):>9.3f}{1e3 * p99:>9.3f}{1e3 * times[-1]:>9.3f}")


if __name__ == "__main__":
    main()
