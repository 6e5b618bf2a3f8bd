"""Both columns of the table in one launch."""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable


def when(call: Call) -> str | None:
    """Any step."""
    return unavailable(call.hardware)


def run(length: Tensor, last_token: Tensor, rows: Tensor, new_length: Tensor, sampling: Tensor, drawn: Tensor) -> None:
    """The contract of `advance_rows`."""
    from firstlight.ops.advance_rows.triton_fused_kernel import BLOCK, advance_rows_kernel

    requests, samples = rows.shape[0], sampling.shape[0]
    advance_rows_kernel[(-(-max(requests, samples) // BLOCK),)](
        length, last_token, rows, new_length, sampling, drawn, requests, samples, BLOCK=BLOCK, num_warps=4
    )
