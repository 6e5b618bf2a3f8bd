"""The device's table of running requests: what changes every step and the scheduler doesn't need to know.

One row a request; row 0 belongs to nobody. Plans bring changes only (joins, pages), and a step's batch is filled from here
with device operations, so the CPU does no work per token.
"""

from __future__ import annotations

import numpy as np
import torch

from firstlight.engine.upload import upload
from firstlight.models.buckets import MIXED_PROMPTS
from firstlight.scheduling.plan import Join, StepPlan
from firstlight.scheduling.sampling import SamplingParams

COLDEST = 1e-6
"""Below this a temperature is 0: the tokens are the greedy ones already, and logits divided by less could overflow."""


class RequestTable:
    """Rows of running requests.

    length: [rows] int64, tokens whose KV and state exist. last_token: [rows] int64, the newest token, not run yet.
    pages: [rows, n] int32, the page table. temperature, top_p: [rows] float32; top_k, seed: [rows] int64.
    position_delta: [rows] int64, added to text positions (MRoPE after images). zeros: int32, never written, for
    as many rows as a padded step has.
    """

    def __init__(self, rows: int, max_pages: int, device: torch.device) -> None:
        self.device = device
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.pages = torch.zeros((rows, max_pages), dtype=torch.int32, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position_delta = torch.zeros(rows, dtype=torch.int64, device=device)
        self.zeros = torch.zeros(rows + MIXED_PROMPTS, dtype=torch.int32, device=device)
        # Host mirrors of what decides launches: known when a request joins.
        self.is_greedy = np.ones(rows, bool)
        self.is_filtered = np.zeros(rows, bool)
        self.tokens: dict[int, np.ndarray] = {}

    def longest(self, page_size: int) -> int:
        """Tokens that a row has room for the pages of."""
        return self.pages.shape[1] * page_size

    def apply(self, plan: StepPlan) -> None:
        """Joins and page appends of a plan."""
        for row in plan.leaves.tolist():
            self.tokens.pop(row, None)
        if plan.joins:
            self._join(plan.joins)
        for group in plan.pages:
            if len(group):
                (entries,) = upload([group], self.device)
                row, column, page = entries.unbind(1)
                self.pages.index_put_((row.long(), column.long()), page)

    def way_of(self, rows: np.ndarray) -> tuple[bool, bool]:
        """How these rows draw: (greedy, filtered): all at temperature 0; any with top-k or top-p."""
        greedy = bool(self.is_greedy[rows].all())
        return greedy, not greedy and bool(self.is_filtered[rows].any())

    def _join(self, joins: list[Join]) -> None:
        sampling = [join.sampling for join in joins]
        host: list[np.ndarray] = [
            np.array([join.row for join in joins], np.int64),
            np.array([join.cached for join in joins], np.int64),
            np.array([_temperature(s) for s in sampling], np.float32),
            np.array([s.top_k for s in sampling], np.int64),
            np.array([s.top_p for s in sampling], np.float32),
            np.array([s.seed for s in sampling], np.int64),
        ]
        rows, *values = upload(host, self.device)
        columns = (self.length, self.temperature, self.top_k, self.top_p, self.seed)
        self.pages.index_fill_(0, rows, 0)
        self.position_delta.index_fill_(0, rows, 0)
        for column, value in zip(columns, values, strict=True):
            column.index_copy_(0, rows, value)
        for join in joins:
            self.tokens[join.row] = join.tokens
            self.is_greedy[join.row] = _temperature(join.sampling) == 0
            self.is_filtered[join.row] = join.sampling.top_k > 0 or join.sampling.top_p < 1


def _temperature(sampling: SamplingParams) -> float:
    return sampling.temperature if sampling.temperature >= COLDEST else 0.0
