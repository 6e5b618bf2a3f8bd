"""Fill a StepBatch from a plan and the request table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from firstlight.engine.request_table import RequestTable
from firstlight.models import CausalModel
from firstlight.ops.op import Shape
from firstlight.scheduling.plan import StepPlan
from firstlight.step import Bucket, PageTable, SlotTable, StepBatch, Table, spread, token_slots

ATTENTION, STATE = "attention", "state"


@dataclass(slots=True)
class FilledBatch:
    """A step's batch and what is needed after it: its rows of the request table, and which of them sample.

    rows: [R] int64. new_length: [R] int64, context after the step. sampling: [S] int64, indices into the rows.
    sampling_rows: the same as rows of the request table, on the host.
    """

    step: StepBatch
    rows: torch.Tensor
    new_length: torch.Tensor
    sampling: torch.Tensor
    sampling_rows: np.ndarray


def choose_bucket(buckets: tuple[Bucket, ...], plan: StepPlan, logits: int) -> Bucket:
    """The first bucket that holds the plan. Raises ValueError if none does: the scheduler broke its bounds."""
    bounds = plan.bounds
    needed = Bucket(0, bounds.tokens, bounds.requests, bounds.query, bounds.context, logits)
    for bucket in buckets:
        if bucket.holds(needed):
            return bucket
    raise ValueError(f"no bucket holds a step of {needed}; the largest is {buckets[-1]}")


def fill(
    model: CausalModel, table: RequestTable, plan: StepPlan, buckets: tuple[Bucket, ...], page_size: int
) -> FilledBatch:
    """The batch of a plan, sized exactly: nothing is padded where no graph asks for it."""
    device = table.device
    decode, prefill = plan.decode, plan.prefill
    decodes = len(decode.rows)
    counts = np.ones(decodes + len(prefill), np.int64)
    counts[decodes:] = [chunk.count for chunk in prefill]
    row_numbers = np.concatenate([decode.rows, np.array([chunk.row for chunk in prefill], np.int32)])
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    final = np.flatnonzero([chunk.final for chunk in prefill]) + decodes
    sampling = np.concatenate([np.arange(decodes), final]).astype(np.int64)

    def send(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    rows, query_start = send(row_numbers), send(starts, torch.int32)
    before = table.length[rows]
    new_length = before + send(counts)
    ids = table.last_token[rows[:decodes]]
    if prefill:
        pieces = [table.tokens[chunk.row][chunk.start : chunk.start + chunk.count] for chunk in prefill]
        ids = torch.cat([ids, send(np.concatenate(pieces))])
    tokens = int(starts[-1])
    length = new_length.int()
    if prefill:
        request, index = spread(query_start, length, tokens)
    else:
        request, index = torch.arange(tokens, device=device), before
    positions = index + table.position_delta[rows][request]
    if model.position_rows > 1:
        positions = positions.expand(model.position_rows, -1).contiguous()
    tables: dict[str, Table] = {}
    row32 = rows.int()
    # Only as many columns as the step's longest context: the width bounds what reads of the table may touch.
    width = -(-plan.bounds.context // page_size)
    pages = table.pages[:, :width]
    tables[ATTENTION] = PageTable(pages, row32, token_slots(pages, row32, request, index, page_size), page_size)
    state_in = np.concatenate([decode.state_in, np.array([chunk.state_in for chunk in prefill], np.int32)])
    state_out = np.concatenate([decode.state_out, np.array([chunk.state_out for chunk in prefill], np.int32)])
    exports = np.array([(decodes + e.chunk, e.offset, e.slot) for e in plan.exports], np.int32).reshape(-1, 3)
    tables[STATE] = SlotTable(send(state_in, torch.int32), send(state_out, torch.int32), send(exports, torch.int32))
    zeros = torch.zeros(len(counts), dtype=torch.int32, device=device)
    step = StepBatch(
        bucket=choose_bucket(buckets, plan, len(sampling)),
        ids=ids,
        positions=positions,
        query_start=query_start,
        length=length,
        log_length=zeros,
        adapter=zeros,
        logit_row=send(starts[sampling + 1] - 1),
        live=torch.full((1,), tokens, dtype=torch.int32, device=device),
        tables=tables,
        decode_requests=decodes,
        decode_tokens=decodes,
        max_query=int(counts.max()),
        max_context=plan.bounds.context,
        shape=Shape(tokens, len(counts), len(counts) * plan.bounds.context, tokens * plan.bounds.context),
    )
    return FilledBatch(step, rows, new_length, send(sampling), row_numbers[sampling])
