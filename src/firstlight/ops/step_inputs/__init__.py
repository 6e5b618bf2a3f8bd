"""What a step's new tokens are and where they go, from the table of running requests: one launch, and no work on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.op import Cost, Op, Shape
from firstlight.ops.step_inputs import triton_fused


def body(
    rows: Tensor,
    query_start: Tensor,
    length: Tensor,
    last_token: Tensor,
    position_delta: Tensor,
    pages: Tensor,
    prompt: Tensor,
    *,
    tokens: int,
    page_size: int,
    position_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, positions, new lengths and cache slots of a step's tokens.

    rows [R] int32: rows of the request table, those that run their last token first; <= 0 is padding. query_start [R + 1]
    int32: tokens of rows[r] are [query_start[r], query_start[r + 1]). length, last_token, position_delta [n] int64: the
    table. pages [n, columns] int32: page numbers, <= 0 is null. prompt [P] int32: the last P of the step's `tokens` T are
    these; the tokens before them are last tokens of their rows, one each.
    With i the place of a token in its request's context (length[row] for its first new one): positions = i +
    position_delta[row], slot = pages[row, i // page_size] * page_size + i % page_size. Padding has length 0.
    Returns (ids [T] int64, positions [T] or [position_rows, T] int64, new_length [R] int32, slot [T] int64). Tokens past
    the last row are given to it, but for their slots, which lie in page 0. Exact: integers.
    """
    row = rows.long().clamp(min=0)
    before = torch.where(rows > 0, length[row], 0)
    start = query_start.long()
    new_length = before + (start[1:] - start[:-1])
    token = torch.arange(tokens, device=rows.device)
    request = torch.searchsorted(start[1:], token, right=True).clamp(max=rows.shape[0] - 1)
    index = before[request] + token - start[request]
    decodes = tokens - prompt.shape[0]
    ids = torch.cat([last_token[row][:decodes], prompt.long()])
    positions = index + torch.where(rows > 0, position_delta[row], 0)[request]
    if position_rows > 1:
        positions = positions.expand(position_rows, -1).contiguous()
    column = torch.div(index, page_size, rounding_mode="floor").clamp(max=pages.shape[1] - 1)
    # Padding may lie past the last row's context, where `column` names a page in use: it goes to page 0.
    page = torch.where(token < start[-1], pages[row[request], column].long().clamp(min=0), 0)
    return ids, positions, new_length.int(), page * page_size + index % page_size


def abstract(
    rows: Tensor,
    query_start: Tensor,
    length: Tensor,
    last_token: Tensor,
    position_delta: Tensor,
    pages: Tensor,
    prompt: Tensor,
    *,
    tokens: int,
    page_size: int,
    position_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    positions = (position_rows, tokens) if position_rows > 1 else (tokens,)
    return (
        length.new_empty((tokens,)),
        length.new_empty(positions),
        rows.new_empty(rows.shape),
        length.new_empty((tokens,)),
    )


def cost(
    shape: Shape,
    rows: Tensor,
    query_start: Tensor,
    length: Tensor,
    last_token: Tensor,
    position_delta: Tensor,
    pages: Tensor,
    prompt: Tensor,
    *,
    tokens: int,
    page_size: int,
    position_rows: int,
) -> Cost:
    """Each row's entries of the table once, a page number a token."""
    return Cost(
        read=rows.nbytes + query_start.nbytes + 24 * rows.shape[0] + prompt.nbytes + 4 * shape.tokens,
        written=4 * rows.shape[0] + (16 + 8 * position_rows) * shape.tokens,
    )


step_inputs = Op("step_inputs", body, abstract=abstract, cost=cost)
step_inputs.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2)
