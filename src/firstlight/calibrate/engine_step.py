"""A step of an engine that is at rest: its rows put in place as if requests had come so far, and run over and over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from firstlight.engine.batch import HostStep, choose_bucket, send
from firstlight.engine.executor import Executor
from firstlight.engine.graphs import StepGraph, draw_tokens
from firstlight.errors import FirstlightError
from firstlight.step import Bucket


def place_step(
    executor: Executor, *, decode: int, context: int, prompts: int = 0, new: int = 0, before: int = 0
) -> HostStep:
    """The step of `decode` requests at `context` tokens each, and `prompts` of `new` tokens each behind `before` that are cached.

    Its rows of the request table, pages and slots are in place afterwards; tokens are random, the same each time. The caches
    hold what they held. Raises FirstlightError if they are too small.
    """
    table, pool = executor.table, executor.pool
    rows, tokens = decode + prompts, decode + prompts * new
    longest = max(context if decode else 0, new + before)
    pages = -(-longest // pool.page_size)
    for name, needed, held in (("pages", rows * pages, pool.pages), ("state slots", rows, pool.slots or rows + 1)):
        if needed >= held:
            raise FirstlightError(f"the step needs {needed:,} {name} and there are {held - 1:,}; see --cache-gib")
    numbers = torch.arange(1, rows * pages + 1, dtype=torch.int32).view(rows, pages)
    table.pages[1 : rows + 1, :pages] = numbers.to(table.device)
    table.length[1 : decode + 1] = context - 1
    table.length[decode + 1 : rows + 1] = before
    ids = np.random.default_rng(0).integers(0, executor.loaded.vocab_size, max(tokens, rows))
    table.last_token[1 : rows + 1] = torch.as_tensor(ids[:rows]).to(table.device)
    names = np.arange(1, rows + 1, dtype=np.int32)
    slots = names if pool.slots else np.zeros(rows, np.int32)
    starts = np.concatenate([[0], np.cumsum([1] * decode + [new] * prompts)]).astype(np.int32)
    return HostStep(
        rows=names,
        starts=starts,
        prompt=ids[decode:tokens].astype(np.int32),
        state_in=slots,
        state_out=slots,
        exports=np.empty((0, 3), np.int32),
        sampling=np.arange(rows),
        decodes=decode,
        context=longest,
    )


def step_runner(
    executor: Executor, step: HostStep, graph: StepGraph | None = None
) -> tuple[Callable[[], None], Bucket]:
    """What runs the step, drawn greedily, on the device; every run is the same step. And the bucket that it runs in.

    graph: pads the step as this graph of the executor's does; None: the step at its own size.
    """
    loaded, table = executor.loaded, executor.table
    lengths = table.length.clone()
    if graph is not None:
        assert executor.graphs is not None
        executor.graphs.send(graph, step)
        bucket = graph.room.bucket
    else:
        bucket, sent_alone = choose_bucket(loaded.buckets, step), send(step, loaded.device)

    def run() -> None:
        table.length.copy_(lengths)
        if graph is None:
            executor.run_sent(step, sent_alone, bucket, greedy=True, filtered=False)
            return
        assert executor.graphs is not None
        made, new_length, sent = executor.graphs.step_of(graph.memory, graph.room)
        draw_tokens(loaded, table, bucket, loaded.model(made), sent, new_length, greedy=True, filtered=False)

    return run, bucket
