"""Everything about a step's tokens in one launch."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import power_of_two, unavailable


def when(call: Call) -> str | None:
    """Any step."""
    return unavailable(call.hardware)


def run(
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
    """The contract of `step_inputs`."""
    from firstlight.ops.step_inputs.triton_fused_kernel import BLOCK, step_inputs_kernel

    ids, slot = length.new_empty(tokens), length.new_empty(tokens)
    positions = length.new_empty((position_rows, tokens) if position_rows > 1 else tokens)
    new_length = rows.new_empty(rows.shape)
    requests = rows.shape[0]
    block_requests = max(16, power_of_two(requests))
    step_inputs_kernel[(-(-max(tokens, requests) // BLOCK),)](
        rows,
        query_start,
        length,
        last_token,
        position_delta,
        pages,
        prompt,
        ids,
        positions,
        new_length,
        slot,
        requests,
        tokens,
        tokens - prompt.shape[0],
        pages.stride(0),
        pages.shape[1],
        page_size,
        POSITION_ROWS=position_rows,
        BLOCK_R=block_requests,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return ids, positions, new_length, slot
