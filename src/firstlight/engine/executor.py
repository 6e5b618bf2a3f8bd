"""Executes plans: applies their changes, runs the model, samples, and hands back the tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from firstlight.cache import CachePool
from firstlight.engine.batch import DeviceStep, HostStep, choose_bucket, fill, read_plan, send
from firstlight.engine.graphs import DRAWS, StepGraphs, draw_tokens
from firstlight.engine.loading import BoundModel
from firstlight.engine.request_table import RequestTable
from firstlight.engine.upload import upload
from firstlight.errors import FirstlightError
from firstlight.scheduling.plan import CHUNK, Move, MoveKind, Place, StepPlan, StepResult
from firstlight.step import Bucket

logger = logging.getLogger(__name__)


class Pending:
    """A plan that has been started; `wait` gives its result.

    check: if set, called over and over while a GPU is waited for; what it raises ends the wait.
    """

    def __init__(self, tokens: torch.Tensor, own: np.ndarray | None = None) -> None:
        """tokens: drawn, on the device; own: which of them are the plan's, in its order; None: all."""
        self._event: torch.cuda.Event | None = None
        self._own = own
        self.check: Callable[[], object] | None = None
        if tokens.is_cuda:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._tokens = tokens

    def wait(self) -> StepResult:
        """The tokens of the plan's sampling rows, one each."""
        if self._event is not None and self.check is not None:
            while not self._event.query():
                self.check()
        elif self._event is not None:
            self._event.synchronize()
        tokens = self._tokens.numpy()
        if self._own is not None:
            tokens = tokens[self._own]
        return StepResult(tokens.astype(np.int32).reshape(-1, 1), np.ones(len(tokens), np.int32))


class Executor:
    """One rank's executor. Plans are executed in the order of their numbers, each completely before the next."""

    def __init__(
        self, loaded: BoundModel, pool: CachePool, rows: int, *, graphs: bool = True, poison: bool = False
    ) -> None:
        """rows: running requests at most. graphs: capture steps, on a GPU. poison: fill null rows, and all pages and
        slots at first, with NaN (tests). On a GPU the largest steps are run, and graphs captured, before this returns, by all
        ranks together; that they took more memory than was planned, and so the caches left free, is a warning."""
        self.loaded, self.pool = loaded, pool
        # A request never has more pages than there are, however long a context the model allows.
        columns = min(-(-loaded.max_context // pool.page_size), pool.pages)
        try:
            self.table = RequestTable(rows + 1, columns, loaded.device)
        except RuntimeError as error:  # an allocator's; torch's own OutOfMemoryError is one
            raise FirstlightError(
                f"--max-running {rows}: {loaded.device} has no memory for a table of so many requests with {columns:,} pages "
                "each; lower it, or --max-context"
            ) from error
        self.stream = torch.cuda.Stream(loaded.device) if loaded.device.type == "cuda" else None
        if poison:
            pool.poison(range(pool.pages), range(pool.slots))
        self.graphs: StepGraphs | None = None
        if self.stream is not None:
            self.stream.synchronize()
            torch.cuda.reset_peak_memory_stats(loaded.device)
            allocated, reserved = torch.cuda.memory_allocated(loaded.device), torch.cuda.memory_reserved(loaded.device)
            self.stream.wait_stream(torch.cuda.current_stream(loaded.device))
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                for step in largest_steps(loaded.buckets, self.table.longest(pool.page_size)):
                    self._run(step, *DRAWS[-1])
                if graphs:
                    self.graphs = StepGraphs(loaded, self.table, pool.page_size, rows, keep_logits=poison)
            self.stream.synchronize()
            peak = max(
                torch.cuda.max_memory_allocated(loaded.device) - allocated,
                torch.cuda.memory_reserved(loaded.device) - reserved,
            )
            if peak > loaded.planned:
                logger.warning(
                    "the largest steps took %.2f GiB beside weights and caches, and %.2f GiB were planned",
                    peak / 2**30,
                    loaded.planned / 2**30,
                )

    @property
    def captured(self) -> list[str]:
        """What there are graphs for, for a comparison between ranks."""
        return [repr(graph.room) for graph in self.graphs.graphs] if self.graphs else []

    def close(self) -> None:
        """Wait for what runs, and free the graphs: NCCL's communicator can't end while a graph holds kernels of it."""
        if self.stream is not None:
            self.stream.synchronize()
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None

    def execute(self, plan: StepPlan) -> Pending:
        """Start a plan. On a GPU this returns before the work is done."""
        with torch.inference_mode(), torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self.table.apply(plan)
            self._move(plan.moves)
            if plan.bounds.requests == 0:
                return Pending(torch.empty(0, dtype=torch.int64))
            step = read_plan(plan, self.table)
            if self.graphs is not None and (graph := self.graphs.find(step)) is not None:
                return Pending(*self.graphs.replay(graph, step))
            return Pending(self._run(step, *self.table.way_of(step.rows[step.sampling])))

    def _run(self, step: HostStep, greedy: bool, filtered: bool) -> torch.Tensor:
        """A step at its own size, op by op."""
        sent = send(step, self.loaded.device)
        return self.run_sent(step, sent, choose_bucket(self.loaded.buckets, step), greedy=greedy, filtered=filtered)

    def run_sent(
        self, step: HostStep, sent: DeviceStep, bucket: Bucket, *, greedy: bool, filtered: bool
    ) -> torch.Tensor:
        """The tokens drawn in a step that is on the device already, op by op: nothing more comes from the host."""
        batch, new_length = fill(
            self.loaded,
            self.table,
            sent,
            bucket,
            decodes=step.decodes,
            tokens=step.tokens,
            query=step.query,
            context=step.context,
            page_size=self.pool.page_size,
        )
        logits = self.loaded.model(batch)
        return draw_tokens(self.loaded, self.table, bucket, logits, sent, new_length, greedy=greedy, filtered=filtered)

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
        numbers = [np.array([move.source for move in run]), np.array([move.target for move in run])]
        sources, targets = upload(numbers, self.loaded.device)
        if run[0].kind is MoveKind.PAGE:
            self.pool.copy_pages(sources, targets)
        else:
            self.pool.copy_slots(sources, targets)


def largest_steps(buckets: tuple[Bucket, ...], longest: int) -> list[HostStep]:
    """The steps that take most memory, on rows of nobody: one long prompt, the longest beside full decode rows, many
    short prompts. Run before the first request, they also compile the kernels that steps with prompts need.

    longest: tokens of a row; of longer ones attention would look for pages behind the row's end.
    """
    largest = buckets[-1]

    def step(counts: list[int], decodes: int) -> HostStep:
        rows = np.zeros(len(counts), np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        exports = np.array([(decodes, min(CHUNK, counts[-1]), 0)], np.int32)
        prompt = np.zeros(int(starts[-1]) - decodes, np.int32)
        return HostStep(rows, starts, prompt, rows, rows, exports, np.arange(len(counts)), decodes, largest.context)

    prompts = largest.query
    steps = [step([min(prompts, longest)], 0)]
    others = min(largest.requests - 1, prompts - 1)
    if others > 0:
        steps.append(step([1] * others + [min(prompts - others, longest)], others))
        each, rest = divmod(prompts, others + 1)
        steps.append(step([min(each + (i < rest), longest) for i in range(others + 1)], 0))
    return steps
