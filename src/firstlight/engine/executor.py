"""Executes plans: applies their changes, runs the model, samples, and hands back the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from firstlight.cache import CachePool
from firstlight.engine.batch import fill
from firstlight.engine.loading import BoundModel
from firstlight.engine.request_table import RequestTable
from firstlight.scheduling.plan import Move, MoveKind, Place, StepPlan, StepResult


class Pending:
    """A plan that has been started; `wait` gives its result."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._tokens = tokens

    def wait(self) -> StepResult:
        """The tokens of the plan's sampling rows, one each."""
        if self._event is not None:
            self._event.synchronize()
        tokens = self._tokens.numpy().astype(np.int32).reshape(-1, 1)
        return StepResult(tokens, np.ones(len(tokens), np.int32))


class Executor:
    """One rank's executor. Plans are executed in the order of their numbers, each completely before the next."""

    def __init__(self, loaded: BoundModel, pool: CachePool, rows: int, poison: bool = False) -> None:
        """rows: running requests at most. poison: fill null rows, and all pages and slots at first, with NaN (tests)."""
        self.loaded, self.pool = loaded, pool
        # A request never has more pages than there are, however long a context the model allows.
        columns = min(-(-loaded.max_context // pool.page_size), pool.pages)
        self.table = RequestTable(rows + 1, columns, loaded.device)
        if poison:
            pool.poison(range(pool.pages), range(pool.slots))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        """Start a plan. On a GPU this returns before the work is done."""
        self.table.apply(plan)
        self._move(plan.moves)
        if plan.bounds.requests == 0:
            return Pending(torch.empty(0, dtype=torch.int64))
        filled = fill(self.loaded.model, self.table, plan, self.loaded.buckets, self.pool.page_size)
        logits = self.loaded.model(filled.step)
        self.table.length[filled.rows] = filled.new_length
        if not len(filled.sampling_rows):
            return Pending(torch.empty(0, dtype=torch.int64))
        rows = filled.rows[filled.sampling]
        tokens = self.loaded.sampler.draw[filled.step.bucket.index](
            logits,
            self.table.temperature[rows],
            self.table.top_k[rows],
            self.table.top_p[rows],
            self.table.seed[rows],
            filled.new_length[filled.sampling],
            greedy=bool(self.table.is_greedy[filled.sampling_rows].all()),
            filtered=bool(self.table.is_filtered[filled.sampling_rows].any()),
        )
        self.table.last_token[rows] = tokens
        return Pending(tokens)

    def _move(self, moves: Sequence[Move]) -> None:
        """Copies on the device, in the order of the list; runs of one kind that don't depend on each other go together."""
        run: list[Move] = []
        for move in moves:
            if move.source_place is not Place.DEVICE or move.target_place is not Place.DEVICE:
                raise ValueError(f"move {move}: this executor moves pages and slots on the device only")
            if run and (
                move.kind is not run[0].kind or any(move.source == m.target or move.target == m.target for m in run)
            ):
                self._copy(run)
                run = []
            run.append(move)
        if run:
            self._copy(run)

    def _copy(self, run: list[Move]) -> None:
        sources, targets = [move.source for move in run], [move.target for move in run]
        if run[0].kind is MoveKind.PAGE:
            self.pool.copy_pages(sources, targets)
        else:
            self.pool.copy_slots(sources, targets)
