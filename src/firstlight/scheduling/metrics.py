"""What the scheduler counts. Totals since start; gauges are read from the scheduler when asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Metrics:
    """Totals, in tokens unless named otherwise.

    looked_up_tokens: of all admitted prompts. matched_tokens: of them, taken from the cache.
    lost_tokens: their KV was there, but no checkpoint of the state to go with it.
    hits: admissions that took something from the cache, of `admissions`.
    prefilled_tokens, decoded_tokens: planned; drafts count as decoded.
    offline_tokens: of both together, planned for offline requests.
    preemptions: requests sent back to waiting. waited_for_prefix: admissions put off because a running prefill was
    about to bring a shared prefix.
    evicted_pages, evicted_checkpoints, exported_checkpoints, handed_over_checkpoints: counts.
    queue_seconds: summed time from submission to first admission, by the injected clock.
    """

    looked_up_tokens: int = 0
    matched_tokens: int = 0
    lost_tokens: int = 0
    admissions: int = 0
    hits: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    offline_tokens: int = 0
    preemptions: int = 0
    waited_for_prefix: int = 0
    evicted_pages: int = 0
    evicted_checkpoints: int = 0
    exported_checkpoints: int = 0
    handed_over_checkpoints: int = 0
    finished: int = 0
    aborted: int = 0
    queue_seconds: float = 0.0
