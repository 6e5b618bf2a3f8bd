"""The only thing a model sees of the world: one batch of new tokens, and where their caches are.

Tensors are on the device, at fixed addresses where graphs are used, and refilled in place. Rows (requests) are ordered
decode and verify first, then prefill, so that a mixed step is two views without a gather (`StepBatch.parts`).

**Null.** Row, page and slot 0 of every pool belong to nobody: padding may read and write them, and what they hold means
nothing (it may be NaN). An index <= 0 is null; `state_in <= 0` starts from zeros. So zero-filled buffers are valid padding.

**In place** is `state_in == state_out`. A hit or a fork reads the shared checkpoint and writes its own slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from firstlight.ops.meta import subtract
from firstlight.ops.op import Shape


@dataclass(frozen=True, slots=True)
class Bucket:
    """Static upper bounds of a step; launch grids come from it, and each call site is bound once for each.

    tokens: new tokens; requests: rows; query: new tokens of one row; context: tokens of one row with this step;
    logits: rows of logits; index: position in the ladder of buckets, which is the index into every call site.
    """

    index: int = 0
    tokens: int = 1
    requests: int = 1
    query: int = 1
    context: int = 1
    logits: int = 1

    def holds(self, other: Bucket) -> bool:
        """Whether a step within `other`'s bounds fits here."""
        return (
            other.tokens <= self.tokens
            and other.requests <= self.requests
            and other.query <= self.query
            and other.context <= self.context
            and other.logits <= self.logits
        )


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the tokens of a paged cache group are.

    pages: [rows, n] int32, page numbers of each row of the request table, in token order; <= 0 is null.
    row: [R] int32, the row of `pages` that a request uses. slot: [T] int64, page * page_size + offset of each new token;
    a value below page_size falls in page 0, so it is written nowhere. page_size: tokens a page; any positive integer.
    """

    pages: torch.Tensor
    row: torch.Tensor
    slot: torch.Tensor
    page_size: int


@dataclass(frozen=True, slots=True)
class SlotTable:
    """Where the states of a slot cache group are.

    state_in: [R] int32, the slot read; <= 0 starts from zeros. state_out: [R] int32, the slot written, <= 0 writes none;
    or [R, q]: the slot for the state after each of the q tokens. exports: [n, 3] int32 = (request, token offset, slot):
    the state after `token offset` new tokens of the request is also written to the slot; slot <= 0 is padding.
    """

    state_in: torch.Tensor
    state_out: torch.Tensor
    exports: torch.Tensor


Table = PageTable | SlotTable


@dataclass(frozen=True, slots=True)
class StepPart:
    """Decode rows, or prefill rows, of a step: views with their own `query_start`, which begins at 0.

    kind: "decode" or "prefill". tokens, requests: slices of the step's T and R. query_start: [r + 1] int32. length: [r]
    int32. log_length: [r] int32. max_query, max_context: upper bounds of a row. tables: this part's rows of every group
    (export rows count from this part's first request).
    """

    kind: str
    tokens: slice
    requests: slice
    query_start: torch.Tensor
    length: torch.Tensor
    log_length: torch.Tensor
    max_query: int
    max_context: int
    tables: Mapping[str, Table]

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """This part's rows of a tensor [T, ...] of the step's tokens; x itself where they are all of them."""
        tokens = self.tokens
        return x if tokens.start == 0 and tokens.stop == x.shape[0] else x[tokens]

    def pages(self, group: str) -> PageTable:
        """The page table of a paged group."""
        table = self.tables[group]
        assert isinstance(table, PageTable)
        return table

    def slots(self, group: str) -> SlotTable:
        """The slot table of a state group."""
        table = self.tables[group]
        assert isinstance(table, SlotTable)
        return table


@dataclass(slots=True)
class StepBatch:
    """One step.

    ids: [T] int64 token ids. positions: [T], or [3, T] for MRoPE, int64. embed_row: [T] int32: 0 takes the token's own
    embedding, else that row of `embeds` [M, H]; None where no row is an image's. query_start: [R + 1] int32. length: [R]
    int32, context with this step. log_length: [R] int32, entries of the replay log that are valid. adapter: [R] int32.
    logit_row: [N] int64, tokens whose logits are wanted. live: [1] int32, real tokens; the rest is padding.
    tables: one per cache group. decode_requests, decode_tokens: how many rows and tokens come first as decode or verify.
    max_query, max_context: of any row. shape: sums for costs.
    """

    bucket: Bucket
    ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    length: torch.Tensor
    log_length: torch.Tensor
    adapter: torch.Tensor
    logit_row: torch.Tensor
    live: torch.Tensor
    tables: Mapping[str, Table]
    decode_requests: int
    decode_tokens: int
    max_query: int
    max_context: int
    embed_row: torch.Tensor | None = None
    embeds: torch.Tensor | None = None
    shape: Shape = field(default_factory=lambda: Shape(1, 1, 1, 1))
    _parts: tuple[StepPart, ...] | None = None

    @property
    def parts(self) -> tuple[StepPart, ...]:
        """The decode part and the prefill part, those that have rows."""
        if self._parts is None:
            self._parts = self._split()
        return self._parts

    def _split(self) -> tuple[StepPart, ...]:
        requests, tokens = self.length.shape[0], self.ids.shape[0]
        parts = []
        if self.decode_requests:
            # A decode row has as many tokens as the others: 1, or 1 + drafts when verifying.
            query = (
                self.max_query if self.decode_requests == requests else -(-self.decode_tokens // self.decode_requests)
            )
            parts.append(self._part("decode", slice(0, self.decode_tokens), slice(0, self.decode_requests), query))
        if self.decode_requests < requests:
            rows = slice(self.decode_requests, requests)
            parts.append(self._part("prefill", slice(self.decode_tokens, tokens), rows, self.max_query))
        return tuple(parts)

    def _part(self, kind: str, tokens: slice, requests: slice, max_query: int) -> StepPart:
        start = self.query_start[requests.start : requests.stop + 1]
        rows = requests.stop - requests.start
        tables: dict[str, Table] = {}
        for group, table in self.tables.items():
            if isinstance(table, PageTable):
                tables[group] = PageTable(table.pages, table.row[requests], table.slot[tokens], table.page_size)
            else:
                # In a mixed step only prompts export; a step of decode rows alone may as well.
                exports = table.exports if kind == "prefill" or rows == self.length.shape[0] else table.exports[:0]
                if requests.start and exports.shape[0]:
                    exports = exports.clone()
                    exports[:, 0] -= requests.start
                tables[group] = SlotTable(table.state_in[requests], table.state_out[requests], exports)
        return StepPart(
            kind=kind,
            tokens=tokens,
            requests=requests,
            query_start=subtract(start, tokens.start) if tokens.start else start,
            length=self.length[requests],
            log_length=self.log_length[requests],
            max_query=max_query,
            max_context=self.max_context,
            tables=tables,
        )


def token_slots(
    pages: torch.Tensor, row: torch.Tensor, request: torch.Tensor, index: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Flat cache row of each new token: [T] int64.

    request: [T], which request a token belongs to; index: [T], its place in that request's context.
    """
    index = index.long()
    page = pages[row.long()[request], torch.div(index, page_size, rounding_mode="floor")].long()
    return page.clamp(min=0) * page_size + index % page_size


def spread(query_start: torch.Tensor, length: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `tokens` new tokens: the request it belongs to and its place in that request's context, [T] int64 each.

    Tokens past the last request (padding) are given to the last request, past its end.
    """
    token = torch.arange(tokens, device=query_start.device)
    request = torch.searchsorted(query_start.long()[1:], token, right=True).clamp(max=length.shape[0] - 1)
    index = length.long()[request] - query_start.long()[request + 1] + token
    return request, index
