"""Token embeddings and the output head, split over the vocabulary."""

from __future__ import annotations

import torch

from firstlight.nn.module import Build, Module, Segment, WeightSpec
from firstlight.ops.all_gather import all_gather
from firstlight.ops.all_reduce import all_reduce
from firstlight.ops.embedding import embedding
from firstlight.ops.gather_rows import gather_rows
from firstlight.ops.linear import linear
from firstlight.ops.op import CallSite
from firstlight.ops.replace_rows import replace_rows
from firstlight.parallel import share
from firstlight.quant import Weight
from firstlight.step import StepBatch


class Embedding(Module):
    """ids [T] -> [T, H]; rows with `embed_row` > 0 come from the step's `embeds`."""

    def __init__(self, build: Build, name: str, vocabulary: int, size: int) -> None:
        super().__init__()
        self.group = build.mesh.tp
        split = vocabulary % self.group.size == 0
        self.start = share(vocabulary, 1, self.group, name).start if split else 0
        self.reduces = split and self.group.size > 1
        segment = Segment(f"{name}.weight", vocabulary, 1 if split else None)
        form = build.scheme.format(segment.source)
        self.declare("weight", WeightSpec((vocabulary, size), ((segment,),), form, self.group, init="embedding"))
        self.lookup = CallSite(embedding)
        self.reduce = CallSite(all_reduce)
        self.replace = CallSite(replace_rows)
        self.dtype = build.dtype

    def forward(self, step: StepBatch) -> torch.Tensor:
        """The residual stream's first values, [T, H]."""
        b = step.bucket.index
        x = self.lookup[b](step.ids, self.weight, start=self.start, dtype=self.dtype)
        if self.reduces:
            x = self.reduce[b](x, self.group)
        if step.embed_row is not None and step.embeds is not None:
            x = self.replace[b](x, step.embed_row, step.embeds)
        return x

    weight: Weight


class Head(Module):
    """Logits of the wanted rows: [T, H] -> [N, vocabulary]. A tied head borrows the embedding's weight."""

    def __init__(self, build: Build, name: str, vocabulary: int, size: int, tied: Embedding | None = None) -> None:
        super().__init__()
        self.group = build.mesh.tp
        self.gathers = vocabulary % self.group.size == 0 and self.group.size > 1
        self._tied = [tied] if tied is not None else []  # in a list: the embedding stays where it is in the module tree
        if tied is None:
            split = vocabulary % self.group.size == 0
            segment = Segment(f"{name}.weight", vocabulary, 1 if split else None)
            form = build.scheme.format(segment.source)
            self.declare("weight", WeightSpec((vocabulary, size), ((segment,),), form, self.group))
        self.rows = CallSite(gather_rows)
        self.product = CallSite(linear)
        self.gather = CallSite(all_gather)

    def forward(self, step: StepBatch, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [N, vocabulary]."""
        b = step.bucket.index
        weight = self._tied[0].weight if self._tied else self.weight
        if not step.logit_row.shape[0]:  # in the middle of a prompt
            vocabulary = weight.shape[0] * (self.group.size if self.gathers else 1)
            return x.new_empty((0, vocabulary))
        return self.logits(b, self.rows[b](x, step.logit_row))

    def logits(self, bucket: int, x: torch.Tensor) -> torch.Tensor:
        """Logits of all rows: [N, H] -> [N, vocabulary]. bucket: the index of the step's."""
        weight = self._tied[0].weight if self._tied else self.weight
        logits = self.product[bucket](x, weight)
        return self.gather[bucket](logits, self.group, dim=-1) if self.gathers else logits

    weight: Weight
