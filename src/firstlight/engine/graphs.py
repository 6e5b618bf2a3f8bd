"""Steps as CUDA graphs, captured before the first request and replayed ever after.

A graph holds a whole step: what its tokens are (from the device's request table) and the forward, and a second one the draw
and what it leaves in the table. So the host sends a step's rows, slots and prompt tokens in one copy and starts two graphs,
however many kernels they hold. There is a graph for each bucket of decode rows; for each bucket of prompt tokens there are
four: one prompt or many (many alone, where one can't have so many), with room for all decode rows beside them or none. What a
step doesn't fill is padding: row, page and slot 0, prompts without tokens, tokens of nobody. A step that fits none runs op by op.

With several ranks the collectives are part of the graphs. Which rooms there are, in what order they are captured and which one a
step takes follow from the options and the plan alone, so all ranks capture and replay the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from firstlight.cache import SlotSpec
from firstlight.engine.batch import DeviceStep, HostStep, fill
from firstlight.engine.loading import BoundModel
from firstlight.engine.request_table import RequestTable
from firstlight.engine.upload import Layout
from firstlight.models.buckets import MIXED_PROMPTS
from firstlight.nn.module import caches
from firstlight.ops.observe import Bound, observed
from firstlight.scheduling.exports import MAX_WISHES
from firstlight.step import Bucket, StepBatch

logger = logging.getLogger(__name__)

DRAWS = ((True, False), (False, False), (False, True))
"""Ways to draw: (greedy: every temperature is 0, filtered: some row uses top-k or top-p)."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a graph has room for. decodes, prompts: rows; prompt_tokens: of all prompts together; exports: states that the
    prompts export on the way.

    Every row draws. What a chunk draws that isn't its prompt's last, its row never reads.
    """

    bucket: Bucket
    decodes: int
    prompts: int = 0
    prompt_tokens: int = 0
    exports: int = 0

    @property
    def rows(self) -> int:
        """Rows of the padded step."""
        return self.decodes + self.prompts

    @property
    def tokens(self) -> int:
        """Tokens of the padded step."""
        return self.decodes + self.prompt_tokens

    def layout(self) -> Layout:
        """What is sent: the fields of a `DeviceStep`."""
        return Layout(
            rows=(np.int32, (self.rows,)),
            starts=(np.int32, (self.rows + 1,)),
            prompt=(np.int32, (self.prompt_tokens,)),
            state_in=(np.int32, (self.rows,)),
            state_out=(np.int32, (self.rows,)),
            exports=(np.int32, (self.exports, 3)),
            sampling=(np.int64, (self.rows,)),
            logit_row=(np.int64, (self.rows,)),
            live=(np.int32, (1,)),
        )

    def holds(self, step: HostStep) -> bool:
        """Whether a step fits."""
        return (
            step.decodes <= self.decodes
            and len(step.rows) - step.decodes <= self.prompts
            and len(step.prompt) <= self.prompt_tokens
            and len(step.exports) <= self.exports
        )

    def pad(self, step: HostStep, fields: dict[str, np.ndarray]) -> np.ndarray:
        """Write a step into the fields of `layout`, all zeros; returns where its own draws are among all, [S]."""
        own, shift = step.decodes, self.decodes - step.decodes
        prompts = len(step.rows) - own
        for name in ("rows", "state_in", "state_out"):
            values = getattr(step, name)
            fields[name][:own] = values[:own]
            fields[name][self.decodes : self.decodes + prompts] = values[own:]
        starts = fields["starts"]
        starts[: self.decodes + 1] = np.arange(self.decodes + 1)
        starts[self.decodes : self.decodes + prompts + 1] = step.starts[own:] + shift
        starts[self.decodes + prompts + 1 :] = starts[self.decodes + prompts]
        fields["prompt"][: len(step.prompt)] = step.prompt
        fields["live"][0] = starts[-1] if self.prompts else own
        exports = fields["exports"][: len(step.exports)]
        exports[:] = step.exports
        exports[:, 0] += shift
        fields["sampling"][:] = np.arange(self.rows)
        fields["logit_row"][: self.decodes + prompts] = starts[1 : self.decodes + prompts + 1] - 1
        return step.sampling + np.where(step.sampling < own, 0, shift)


@dataclass(slots=True)
class StepGraph:
    """layout, memory: of what is sent, at a fixed address. forward: inputs to logits. draws: logits to tokens and back into the table,
    by (greedy, filtered). tokens: [rows] int64, where each leaves them. logits: kept for tests only: their memory
    is other graphs' too."""

    room: Room
    layout: Layout
    memory: torch.Tensor
    forward: torch.cuda.CUDAGraph
    draws: dict[tuple[bool, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]]
    logits: torch.Tensor | None = None


class StepGraphs:
    """The graphs of one rank. `reasons` says of a room that has none why not."""

    def __init__(
        self, loaded: BoundModel, table: RequestTable, page_size: int, max_running: int, *, keep_logits: bool = False
    ) -> None:
        """Capture all of them on the current stream, which must not be the default one."""
        self.loaded, self.table, self.page_size, self.keep_logits = loaded, table, page_size, keep_logits
        self.graphs: list[StepGraph] = []
        self.reasons: dict[Room, str] = {}
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones then fit into its memory.
        stateful = any(isinstance(spec, SlotSpec) for spec in caches(loaded.model).values())
        for room in reversed(rooms(loaded.buckets, max_running, stateful and loaded.options.prefix_cache)):
            graph = self._capture(room, pool)
            if graph is not None:
                self.graphs.insert(0, graph)
        for reason in dict.fromkeys(self.reasons.values()):
            missing = [room for room, other in self.reasons.items() if other == reason]
            logger.warning("%d of %d kinds of step run without a graph: %s", len(missing), self.count, reason)

    def close(self) -> None:
        """Free the graphs; nothing of them may be running."""
        for graph in self.graphs:
            graph.forward.reset()
            for draw, _ in graph.draws.values():
                draw.reset()
        self.graphs = []

    @property
    def count(self) -> int:
        """Graphs captured, and those that could not be."""
        return len(self.graphs) + len(self.reasons)

    def find(self, step: HostStep) -> StepGraph | None:
        """The smallest graph that holds a step."""
        return next((graph for graph in self.graphs if graph.room.holds(step)), None)

    def send(self, graph: StepGraph, step: HostStep) -> np.ndarray:
        """Put a step where its graph reads it; returns which of the drawn tokens it asks for."""
        staging, fields = graph.layout.stage()
        own = graph.room.pad(step, fields)
        graph.memory.copy_(staging, non_blocking=True)
        return own

    def replay(self, graph: StepGraph, step: HostStep) -> tuple[torch.Tensor, np.ndarray]:
        """Start a step. Returns the drawn tokens, which the next replay overwrites, and which of them the step asked for."""
        own = self.send(graph, step)
        graph.forward.replay()
        draw, tokens = graph.draws[self.table.way_of(step.rows[step.sampling])]
        draw.replay()
        return tokens, own

    def step_of(self, memory: torch.Tensor, room: Room) -> tuple[StepBatch, torch.Tensor, DeviceStep]:
        """The padded batch that a graph runs, over the buffer that is sent."""
        sent = DeviceStep(**room.layout().views(memory))
        step, new_length = fill(
            self.loaded,
            self.table,
            sent,
            room.bucket,
            decodes=room.decodes,
            tokens=room.tokens,
            query=max(1, room.prompt_tokens),
            context=room.bucket.context,
            page_size=self.page_size,
        )
        return step, new_length, sent

    def _capture(self, room: Room, pool: Any) -> StepGraph | None:
        loaded = self.loaded
        memory = self._memory(room)

        def forward() -> tuple[torch.Tensor, torch.Tensor, DeviceStep]:
            step, new_length, sent = self.step_of(memory, room)
            return loaded.model(step), new_length, sent

        if reason := self._waits(
            forward, room.bucket.index
        ):  # also compiles; what kernels allocate once stays outside the graph
            self.reasons[room] = reason
            return None
        graph = torch.cuda.CUDAGraph()
        with _capturing(graph, pool):
            logits, new_length, sent = forward()
        draws = {}
        for greedy, filtered in DRAWS:

            def draw(greedy: bool = greedy, filtered: bool = filtered) -> torch.Tensor:
                return draw_tokens(
                    loaded, self.table, room.bucket, logits, sent, new_length, greedy=greedy, filtered=filtered
                )

            if reason := self._waits(draw, room.bucket.index):
                self.reasons[room] = reason
                return None
            drawing = torch.cuda.CUDAGraph()
            with _capturing(drawing, pool):
                tokens = draw()
            draws[greedy, filtered] = drawing, tokens
        return StepGraph(room, room.layout(), memory, graph, draws, logits if self.keep_logits else None)

    def _memory(self, room: Room) -> torch.Tensor:
        """The buffer of a room, holding a step of nobody's rows that is as large as can be."""
        staging, fields = room.layout().stage()
        room.pad(step_of_nobody(room, self.table.longest(self.page_size)), fields)
        return staging.to(self.table.device)

    def _waits(self, run: Callable[[], object], bucket: int) -> str | None:
        """Which op makes the host wait for the device, and so can't be part of a graph; None if none does."""
        last: list[Bound] = []

        def observe(bound: Bound, args, kwargs):  # type: ignore[no-untyped-def]
            last[:] = [bound]
            return bound.run(*args, **kwargs)

        loaded = self.loaded
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with ExitStack() as stack:
                for module in (loaded.model, loaded.sampler, loaded.requests):
                    stack.enter_context(observed(module, observe, bucket))
                run()
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            return f"{last[0].op.name} waits for the GPU in the provider that is bound" if last else str(error)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return None


def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> torch.cuda.graph:
    """Capture on the current stream. What other threads do is their own: NCCL's watchdog looks at its events meanwhile."""
    return torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local")


def rooms(buckets: tuple[Bucket, ...], max_running: int, exporting: bool) -> list[Room]:
    """What there are graphs for, from the smallest on. exporting: prompts leave states for the prefix cache.

    A bucket has none for one prompt if the bucket before it holds the longest.
    """
    made = []
    held = 0  # tokens of a prompt, by the buckets so far
    for bucket in buckets:
        if bucket.query == 1:
            made.append(Room(bucket, bucket.requests))
        else:
            made += [
                Room(bucket, decodes, prompts, bucket.query, 2 * prompts + MAX_WISHES if exporting else 0)
                for decodes in (0, max_running)
                for prompts in sorted({1, min(max_running, MIXED_PROMPTS)})
                if prompts > 1 or held < bucket.context
            ]
            held = bucket.query
    return made


def step_of_nobody(room: Room, longest: int) -> HostStep:
    """A step of nobody's rows that is as large as can be, with one prompt where there is room for any.

    longest: tokens of a row; of longer ones attention would look for pages behind the row's end.
    """
    prompt = min(room.prompt_tokens, longest)
    rows = np.zeros(room.decodes + min(room.prompts, 1), np.int32)
    starts = np.arange(len(rows) + 1, dtype=np.int32)
    starts[-1] = room.decodes + prompt
    return HostStep(
        rows=rows,
        starts=starts,
        prompt=np.zeros(prompt, np.int32),
        state_in=rows,
        state_out=rows,
        exports=np.empty((0, 3), np.int32),
        sampling=np.arange(len(rows)),
        decodes=room.decodes,
        context=room.bucket.context,
    )


def draw_tokens(
    loaded: BoundModel,
    table: RequestTable,
    bucket: Bucket,
    logits: torch.Tensor,
    sent: DeviceStep,
    new_length: torch.Tensor,
    *,
    greedy: bool,
    filtered: bool,
) -> torch.Tensor:
    """Draw a token for each sampling row and carry the step's outcome into the table; [S] int64. Device work only."""
    rows = sent.rows[sent.sampling].long()
    tokens = rows
    if len(rows):
        tokens = loaded.sampler.draw[bucket.index](
            logits,
            table.temperature[rows],
            table.top_k[rows],
            table.top_p[rows],
            table.seed[rows],
            new_length[sent.sampling].long(),
            greedy=greedy,
            filtered=filtered,
        )
    loaded.requests.advance[bucket.index](table.length, table.last_token, sent.rows, new_length, sent.sampling, tokens)
    return tokens
