"""What happens on the device before and after a forward: ops on the table of requests, bound like the model's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstlight.hardware import Hardware
from firstlight.ops.advance_rows import advance_rows
from firstlight.ops.binding import Record
from firstlight.ops.op import Call, CallSite
from firstlight.ops.step_inputs import step_inputs
from firstlight.step import Bucket


class RequestOps(torch.nn.Module):
    """inputs: what the step's tokens are and where they go. advance: its outcome back into the table."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = CallSite(step_inputs)
        self.advance = CallSite(advance_rows)

    def records(
        self, buckets: Sequence[Bucket], position_rows: int, page_size: int, hardware: Hardware
    ) -> list[Record]:
        """What to bind: one call of each a bucket, at its bounds."""

        def empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device="meta")

        records = []
        for bucket in buckets:
            rows, starts = empty(bucket.requests, dtype=torch.int32), empty(bucket.requests + 1, dtype=torch.int32)
            table = [empty(bucket.requests + 1) for _ in range(3)]
            pages = empty(bucket.requests + 1, -(-bucket.context // page_size), dtype=torch.int32)
            prompt = empty(0 if bucket.query == 1 else bucket.tokens, dtype=torch.int32)
            arguments = {"tokens": bucket.tokens, "page_size": page_size, "position_rows": position_rows}
            call = Call((rows, starts, *table, pages, prompt), arguments, bucket, hardware)
            records.append(Record("requests.inputs", self.inputs, call))
            samples = empty(bucket.logits)
            call = Call((table[0], table[1], rows, rows, samples, samples), {}, bucket, hardware)
            records.append(Record("requests.advance", self.advance, call))
        return records
