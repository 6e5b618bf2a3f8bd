"""What the scheduler counts. Totals since start; gauges are read from the scheduler when asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Metrics:
    """Totals, in tokens unless named otherwise.

    looked_up_tokens: of all admitted prompts. matched_tokens: of them, taken from the cache.
    lost_tokens: their KV was there, but no checkpoint of the state to go with it.
    prefilled_tokens: planned.
    preemptions: requests sent back to waiting. waited_for_prefix: admissions put off because a running prefill was
    about to bring a shared prefix. evicted_pages: a count.
    """

    looked_up_tokens: int = 0
    matched_tokens: int = 0
    lost_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0
    waited_for_prefix: int = 0
    evicted_pages: int = 0
