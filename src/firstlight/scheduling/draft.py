"""A plan in the making: what the parts of the scheduler decide, collected until it becomes a `StepPlan`."""

from __future__ import annotations

import numpy as np

from firstlight.scheduling.plan import Bounds, Chunk, Decode, Export, Join, Move, MoveKind, StepPlan
from firstlight.scheduling.prefix_nodes import Hit
from firstlight.scheduling.progress import Progress
from firstlight.scheduling.rows import Batch


class Draft:
    """granted: by request, how many tokens it prefills in this step, in the order of the plan's chunks."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.granted: dict[Progress, int] = {}
        self._joins: list[Join] = []
        self._pages: dict[Progress, tuple[int, int]] = {}
        self._moves: list[Move] = []
        self._exports: list[tuple[Progress, int, int]] = []

    def grant(self, progress: Progress, budget: int, multiple: int) -> int:
        """Lets the request prefill up to `budget` tokens more in this step; returns how many it takes.

        A prefill that goes on in the next step stops at a multiple of `multiple` tokens from the chunk's start, if it
        gets that far, so that states can be exported at the same places however it is cut.
        """
        before = self.granted.get(progress, 0)
        total = min(before + budget, progress.target - progress.planned)
        if progress.planned + total < progress.target and total > multiple:
            total -= total % multiple
        if total <= before:
            return 0
        self.granted[progress] = total
        return total - before

    def join(self, progress: Progress) -> None:
        """A request that has just been admitted, with all its pages, and the copy of its last one if it needs that."""
        request, hit = progress.request, progress.hit
        self._joins.append(
            Join(
                progress.row,
                request.id,
                progress.tokens(),
                len(request.prompt),
                hit.length,
                request.sampling,
                progress.slot,
                request.identity.adapter,
            )
        )
        self.append_pages(progress, len(progress.pages))
        if hit.source is not None:
            self._moves.append(Move(MoveKind.PAGE, hit.source.page, progress.pages[len(hit.pages)]))

    def append_pages(self, progress: Progress, count: int) -> None:
        """The last `count` pages of the request are new in its page table. The latest word counts: it may have grown,
        been preempted, and joined again."""
        self._pages[progress] = progress.row, count

    def export(self, progress: Progress, offset: int, slot: int) -> None:
        """A checkpoint after `offset` tokens of the request's chunk."""
        self._exports.append((progress, offset, slot))

    def finish(self, leaves: list[int], batch: Batch, drafts: int, decode_context: int) -> StepPlan:
        """The plan. `batch`: the decode rows, their slots and requests."""
        rows, slots, _ = batch
        chunks = [self._chunk(progress, count) for progress, count in self.granted.items()]
        places = {progress: index for index, progress in enumerate(self.granted)}
        query = max(self.granted.values(), default=0)
        context = max((chunk.start + chunk.count for chunk in chunks), default=0)
        bounds = Bounds(
            tokens=len(rows) * (1 + drafts) + sum(self.granted.values()),
            requests=len(rows) + len(chunks),
            query=max(query, 1 + drafts if len(rows) else 0),
            context=max(context, decode_context),
        )
        return StepPlan(
            self.number,
            np.asarray(leaves, np.int32),
            self._joins,
            (self._page_entries(),),
            self._moves,
            Decode(rows, slots, slots, drafts),
            chunks,
            [Export(places[progress], progress.row, offset, slot) for progress, offset, slot in self._exports],
            bounds,
        )

    def _page_entries(self) -> np.ndarray:
        rows: list[int] = []
        indices: list[int] = []
        pages: list[int] = []
        for progress, (row, count) in self._pages.items():
            if progress.row == row and not progress.draining:  # else preempted since, and the row may be another's
                first = len(progress.pages) - count
                rows += [row] * count
                indices += range(first, first + count)
                pages += progress.pages[first:]
        return np.ascontiguousarray(np.array([rows, indices, pages], np.int32).T)

    def _chunk(self, progress: Progress, count: int) -> Chunk:
        start = progress.planned
        final = start + count == progress.target
        return Chunk(progress.row, start, count, final, _state_before(progress, start, progress.hit), progress.slot)


def _state_before(progress: Progress, start: int, hit: Hit) -> int:
    if start > hit.length:
        return progress.slot
    return hit.checkpoint.slot if hit.checkpoint is not None else 0
