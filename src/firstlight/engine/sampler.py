"""Draws tokens from logits. A module of its own, bound like the model's, so that it can be captured and timed apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstlight.hardware import Hardware
from firstlight.ops.binding import Record
from firstlight.ops.op import Call, CallSite
from firstlight.ops.sample import sample
from firstlight.step import Bucket


class Sampler(torch.nn.Module):
    """logits [N, V] and each row's sampling -> tokens [N]."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = CallSite(sample)

    def records(
        self, buckets: Sequence[Bucket], vocabulary: int, dtype: torch.dtype, hardware: Hardware
    ) -> list[Record]:
        """What to bind: one call a bucket, at its bound of rows."""

        def call(bucket: Bucket) -> Call:
            rows = bucket.logits
            arguments = (
                torch.empty((rows, vocabulary), dtype=dtype, device="meta"),
                torch.empty(rows, device="meta"),
                torch.empty(rows, dtype=torch.int64, device="meta"),
                torch.empty(rows, device="meta"),
                torch.empty(rows, dtype=torch.int64, device="meta"),
                torch.empty(rows, dtype=torch.int64, device="meta"),
            )
            return Call(arguments, {"greedy": False, "filtered": True}, bucket, hardware)

        return [Record("sampler.draw", self.draw, call(bucket)) for bucket in buckets]
