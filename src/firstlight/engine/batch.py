"""A StepBatch from a plan: what only the host knows is sent, everything else the device finds in its request table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from firstlight.engine.loading import BoundModel
from firstlight.engine.request_table import RequestTable
from firstlight.engine.upload import upload
from firstlight.ops.op import Shape
from firstlight.scheduling.plan import StepPlan
from firstlight.step import Bucket, PageTable, SlotTable, StepBatch

ATTENTION, STATE = "attention", "state"


@dataclass(slots=True)
class HostStep:
    """What a plan says of a step, on the host.

    rows: [R] int32, of the request table, decode rows first. starts: [R + 1] int32, each row's first token. prompt: [P]
    int32, tokens of the prefill rows. state_in, state_out: [R] int32. exports: [n, 3] int32. sampling: [S] int64, which of
    the rows draw a token. decodes: rows that run their last token. context: of any row with this step.
    """

    rows: np.ndarray
    starts: np.ndarray
    prompt: np.ndarray
    state_in: np.ndarray
    state_out: np.ndarray
    exports: np.ndarray
    sampling: np.ndarray
    decodes: int
    context: int

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return int(self.starts[-1])

    @property
    def query(self) -> int:
        """New tokens of one row at most."""
        return int((self.starts[1:] - self.starts[:-1]).max())


@dataclass(slots=True)
class DeviceStep:
    """The same on the device, with the rows that logits are wanted of: logit_row [S] int64; live [1] int32."""

    rows: torch.Tensor
    starts: torch.Tensor
    prompt: torch.Tensor
    state_in: torch.Tensor
    state_out: torch.Tensor
    exports: torch.Tensor
    sampling: torch.Tensor
    logit_row: torch.Tensor
    live: torch.Tensor


def read_plan(plan: StepPlan, table: RequestTable) -> HostStep:
    """The step of a plan."""
    decode, prefill = plan.decode, plan.prefill
    decodes = len(decode.rows)
    counts = np.ones(decodes + len(prefill), np.int32)
    counts[decodes:] = [chunk.count for chunk in prefill]
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    final = np.flatnonzero([chunk.final for chunk in prefill]) + decodes

    def both(rows: np.ndarray, chunks: list[int]) -> np.ndarray:
        return np.concatenate([rows, np.array(chunks, np.int32)]) if chunks else rows

    pieces = [table.tokens[chunk.row][chunk.start : chunk.start + chunk.count] for chunk in prefill]
    return HostStep(
        rows=both(decode.rows, [chunk.row for chunk in prefill]),
        starts=starts,
        prompt=np.concatenate(pieces) if pieces else np.empty(0, np.int32),
        state_in=both(decode.state_in, [chunk.state_in for chunk in prefill]),
        state_out=both(decode.state_out, [chunk.state_out for chunk in prefill]),
        exports=np.array([(decodes + e.chunk, e.offset, e.slot) for e in plan.exports], np.int32).reshape(-1, 3),
        sampling=np.concatenate([np.arange(decodes), final]).astype(np.int64),
        decodes=decodes,
        context=plan.bounds.context,
    )


def send(step: HostStep, device: torch.device) -> DeviceStep:
    """One copy to the device."""
    return DeviceStep(
        *upload(
            [
                step.rows,
                step.starts,
                step.prompt,
                step.state_in,
                step.state_out,
                step.exports,
                step.sampling,
                (step.starts[step.sampling + 1] - 1).astype(np.int64),
                step.starts[-1:],
            ],
            device,
        )
    )


def choose_bucket(buckets: tuple[Bucket, ...], step: HostStep) -> Bucket:
    """The first bucket that holds the step. Raises ValueError if none does: the scheduler broke its bounds."""
    # Prefill is bound only where a bucket allows longer queries; a prompt's single token goes there too.
    query = step.query if step.decodes == len(step.rows) else max(step.query, 2)
    needed = Bucket(0, step.tokens, len(step.rows), query, step.context, len(step.sampling))
    for bucket in buckets:
        if bucket.holds(needed):
            return bucket
    raise ValueError(f"no bucket holds a step of {needed}; the largest is {buckets[-1]}")


def fill(
    loaded: BoundModel,
    table: RequestTable,
    sent: DeviceStep,
    bucket: Bucket,
    *,
    decodes: int,
    tokens: int,
    query: int,
    context: int,
    page_size: int,
) -> tuple[StepBatch, torch.Tensor]:
    """The batch, of `tokens` tokens in all, and each row's length after the step, [R] int32. Device work only."""
    requests = sent.rows.shape[0]
    # Only as many columns as the step's longest context: the width bounds what reads of the table may touch.
    pages = table.pages[:, : -(-context // page_size)]
    ids, positions, new_length, slot = loaded.requests.inputs[bucket.index](
        sent.rows,
        sent.starts,
        table.length,
        table.last_token,
        table.position_delta,
        pages,
        sent.prompt,
        tokens=tokens,
        page_size=page_size,
        position_rows=loaded.model.position_rows,
    )
    step = StepBatch(
        bucket=bucket,
        ids=ids,
        positions=positions,
        query_start=sent.starts,
        length=new_length,
        log_length=table.zeros[:requests],
        adapter=table.zeros[:requests],
        logit_row=sent.logit_row,
        live=sent.live,
        tables={
            ATTENTION: PageTable(pages, sent.rows, slot, page_size),
            STATE: SlotTable(sent.state_in, sent.state_out, sent.exports),
        },
        decode_requests=decodes,
        decode_tokens=decodes,
        max_query=query,
        max_context=context,
        shape=Shape(tokens, requests, requests * context, tokens * context),
    )
    return step, new_length
