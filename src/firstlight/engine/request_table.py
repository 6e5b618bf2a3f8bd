"""The device's table of running requests: what changes every step and the scheduler doesn't need to know.

One row a request; row 0 belongs to nobody. Plans bring changes only (joins, pages), and a step's batch is filled from here
with device operations, so the CPU does no work per token.
"""

from __future__ import annotations

import numpy as np
import torch

from firstlight.scheduling.plan import Join, StepPlan
from firstlight.scheduling.sampling import SamplingParams

COLDEST = 1e-6
"""Below this a temperature is 0: the tokens are the greedy ones already, and logits divided by less could overflow."""


class RequestTable:
    """Rows of running requests.

    length: [rows] int64, tokens whose KV and state exist. last_token: [rows] int64, the newest token, not run yet.
    pages: [rows, n] int32, the page table. temperature, top_p: [rows] float32; top_k, seed: [rows] int64.
    position_delta: [rows] int64, added to text positions (MRoPE after images).
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
        # Host mirrors of what decides launches: known when a request joins.
        self.is_greedy = np.ones(rows, bool)
        self.is_filtered = np.zeros(rows, bool)
        self.tokens: dict[int, np.ndarray] = {}

    def apply(self, plan: StepPlan) -> None:
        """Joins and page appends of a plan."""
        for row in plan.leaves.tolist():
            self.tokens.pop(row, None)
        if plan.joins:
            self._join(plan.joins)
        for group in plan.pages:
            if len(group):
                entries = torch.tensor(group, dtype=torch.int64, device=self.device)
                self.pages[entries[:, 0], entries[:, 1]] = entries[:, 2].int()

    def _join(self, joins: list[Join]) -> None:
        rows = torch.tensor([join.row for join in joins], device=self.device)
        self.pages[rows] = 0

        def put(column: torch.Tensor, values: list[float] | list[int]) -> None:
            column[rows] = torch.tensor(values, dtype=column.dtype, device=self.device)

        put(self.length, [join.cached for join in joins])
        put(self.temperature, [_temperature(join.sampling) for join in joins])
        put(self.top_k, [join.sampling.top_k for join in joins])
        put(self.top_p, [join.sampling.top_p for join in joins])
        put(self.seed, [join.sampling.seed for join in joins])
        put(self.position_delta, [0] * len(joins))
        for join in joins:
            self.tokens[join.row] = join.tokens
            self.is_greedy[join.row] = _temperature(join.sampling) == 0
            self.is_filtered[join.row] = join.sampling.top_k > 0 or join.sampling.top_p < 1


def _temperature(sampling: SamplingParams) -> float:
    return sampling.temperature if sampling.temperature >= COLDEST else 0.0
