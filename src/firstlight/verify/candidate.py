"""Our model, run over the phases: whole, and module by module on the reference's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from firstlight.cache import CachePool, PagedSpec
from firstlight.models import CausalModel
from firstlight.models.walk import bind_caches
from firstlight.nn.module import Carry, caches
from firstlight.ops.handover import kept_plain
from firstlight.step import Bucket, PageTable, SlotTable, StepBatch, Table, token_slots
from firstlight.verify.reference import Call, Record
from firstlight.verify.workload import LONG, Row, Sequence

PAGE_SIZE = 16
ROWS = 8
"""Rows of a step at most."""
DECODE_BUCKET = Bucket(0, ROWS, ROWS, 1, LONG, ROWS)
PREFILL_BUCKET = Bucket(1, LONG, ROWS, LONG, LONG, LONG)
BUCKETS = (DECODE_BUCKET, PREFILL_BUCKET)

Values = Callable[[str], Call]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a module of ours gave in one step, beside the reference's: pairs of [T, N]; or how it failed.

    gap: [T], how clear the reference's choice of experts is; see `routing_gaps`.
    """

    path: str
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    gap: torch.Tensor | None = None
    failure: str = ""


class Candidate:
    """A loaded, bound model with a pool of its own, whose pages and slots are scattered and poisoned with NaN."""

    def __init__(self, model: CausalModel, sequences: list[Sequence], device: torch.device, dtype: torch.dtype) -> None:
        """model: bound for BUCKETS and loaded on `device`."""
        self.model, self.sequences, self.device, self.dtype = model, sequences, device, dtype
        count = len(sequences)
        width = LONG // PAGE_SIZE
        shuffled = 1 + torch.randperm(count * width, generator=torch.Generator().manual_seed(0))
        self.pages = torch.zeros(count + 1, width, dtype=torch.int32)
        self.pages[1:] = shuffled.reshape(count, width)
        self.pool = CachePool(
            caches(model), pages=count * width + 1, slots=2 * count + 1, page_size=PAGE_SIZE, device=device
        )
        bind_caches(model, self.pool)

    def reset(self) -> None:
        """Poison every page and slot, the null ones too."""
        self.pool.poison(range(self.pool.pages), range(self.pool.slots))

    def slot(self, sequence: int) -> int:
        """The state slot of a sequence; neighbours in the batch aren't neighbours in the pool."""
        return len(self.sequences) - sequence

    def checkpoint(self, sequence: int) -> int:
        """The slot of a sequence's exported state."""
        return len(self.sequences) + 1 + sequence

    def step(self, rows: tuple[Row, ...]) -> StepBatch:
        """The step batch of some rows; logits of all tokens are wanted, the last token's first."""
        sequences = [self.sequences[row.sequence] for row in rows]
        spans = [slice(row.start, row.start + row.count) for row in rows]
        decodes = sum(row.decode for row in rows)
        counts = [row.count for row in rows]
        tokens = sum(counts)
        bucket = DECODE_BUCKET if decodes == len(rows) else PREFILL_BUCKET
        i32 = self._int32
        positions = [self._positions(sequence)[..., span] for sequence, span in zip(sequences, spans, strict=True)]
        length = [row.start + row.count for row in rows]
        return StepBatch(
            bucket=bucket,
            ids=torch.cat([sequence.ids[span] for sequence, span in zip(sequences, spans, strict=True)]).to(
                self.device
            ),
            positions=torch.cat(positions, dim=-1).to(self.device),
            query_start=i32([0, *torch.tensor(counts).cumsum(0).tolist()]),
            length=i32(length),
            log_length=i32([0] * len(rows)),
            adapter=i32([0] * len(rows)),
            logit_row=torch.arange(tokens, device=self.device).flip(0),
            live=i32([tokens]),
            tables=self._tables(rows),
            decode_requests=decodes,
            decode_tokens=decodes,
            max_query=max(counts),
            max_context=max(length),
        )

    def _int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _positions(self, sequence: Sequence) -> torch.Tensor:
        """[T], or [3, T] for a model with MRoPE."""
        if self.model.position_rows == 3 and sequence.positions.dim() == 1:
            return sequence.positions.expand(3, -1)
        return sequence.positions

    def _tables(self, rows: tuple[Row, ...]) -> dict[str, Table]:
        tables: dict[str, Table] = {}
        for spec in caches(self.model).values():
            if spec.group in tables:
                continue
            tables[spec.group] = self._page_table(rows) if isinstance(spec, PagedSpec) else self._slot_table(rows)
        return tables

    def _page_table(self, rows: tuple[Row, ...]) -> PageTable:
        pages = self.pages.clone()
        for row in rows:
            if row.parent is not None:  # the shared pages stay those of this sequence in later steps
                shared = row.start // PAGE_SIZE
                self.pages[row.sequence + 1, :shared] = pages[row.sequence + 1, :shared] = pages[
                    row.parent + 1, :shared
                ]
        line = self._int32([row.sequence + 1 for row in rows])
        request = torch.cat([torch.full((row.count,), i) for i, row in enumerate(rows)]).to(self.device)
        index = torch.cat([torch.arange(row.start, row.start + row.count) for row in rows]).to(self.device)
        pages = pages.to(self.device)
        return PageTable(pages, line, token_slots(pages, line, request, index, PAGE_SIZE), PAGE_SIZE)

    def _slot_table(self, rows: tuple[Row, ...]) -> SlotTable:
        def source(row: Row) -> int:
            if row.parent is not None:
                return self.checkpoint(row.parent)
            return self.slot(row.sequence) if row.start else 0

        exports = [[i, row.export, self.checkpoint(row.sequence)] for i, row in enumerate(rows) if row.export]
        return SlotTable(
            self._int32([source(row) for row in rows]),
            self._int32([self.slot(row.sequence) for row in rows]),
            torch.tensor(exports, dtype=torch.int32, device=self.device).reshape(-1, 3),
        )

    def run_whole(self, step: StepBatch, rows: tuple[Row, ...], records: list[Record]) -> Iterator[Answer]:
        """The model as it is served: the residual stream after every layer, and the logits."""
        values = self._values(rows, records)
        streams: dict[str, torch.Tensor] = {}
        hooks = []

        def watch(path: str) -> Callable[..., None]:
            def hook(module: torch.nn.Module, args: tuple[object, ...], output: object) -> None:
                carry = args[1]
                assert isinstance(carry, Carry)
                streams[path] = _stream(carry)

            return hook

        for i, layer in enumerate(self.model.layers):
            hooks.append(layer.register_forward_hook(watch(f"layers.{i}")))
        failure, logits = "", None
        try:
            logits = self.model(step)
        except Exception as error:  # whatever a module raises is a finding about it
            failure = failure_of(error)
        finally:
            for hook in hooks:
                hook.remove()
        for path, stream in streams.items():
            yield Answer(path, ((stream, values(path).outputs[0]),), values(path).gap)
        pairs = () if logits is None else ((logits.flip(0), values("lm_head").outputs[0]),)
        yield Answer("lm_head", pairs, failure=failure)

    def run_modules(self, step: StepBatch, rows: tuple[Row, ...], records: list[Record]) -> Iterator[Answer]:
        """Every module that the records know but whole layers, each on the reference's inputs."""
        values = self._values(rows, records)
        angles = values("rotary").outputs[0]
        for path in records[rows[0].sequence]:
            if path.count(".") == 1:
                continue
            call = values(path)
            try:
                yield Answer(path, tuple(zip(self._run(path, step, call, angles), call.outputs, strict=True)), call.gap)
            except Exception as error:
                yield Answer(path, (), failure=failure_of(error))

    def run_module(self, path: str, step: StepBatch, rows: tuple[Row, ...], records: list[Record]) -> None:
        """One module on the reference's inputs, for what an observer sees of it."""
        values = self._values(rows, records)
        self._run(path, step, values(path), values("rotary").outputs[0])

    def run_layers(self, step: StepBatch, rows: tuple[Row, ...], records: list[Record]) -> Iterator[Answer]:
        """Every layer as a whole on the reference's inputs: what its modules don't show is in how they are wired."""
        values = self._values(rows, records)
        for i, layer in enumerate(self.model.layers):
            path = f"layers.{i}"
            call = values(path)
            hidden, residual = (self._cast(value) for value in call.inputs)
            assert residual is not None
            carry = Carry(residual=residual, angles=values("rotary").outputs[0], hidden=hidden)
            try:
                layer(step, carry)
                yield Answer(path, ((_stream(carry), call.outputs[0]),), call.gap)
            except Exception as error:
                yield Answer(path, (), failure=failure_of(error))

    def _run(self, path: str, step: StepBatch, call: Call, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        module = self.model.get_submodule(path)
        inputs = tuple(self._cast(value) for value in call.inputs)
        with kept_plain(module):
            if path == "lm_head":
                return (module(step, *inputs).flip(0),)
            if path.endswith("norm"):
                return module(step, *inputs)
            return (module(step, *inputs, angles) if path.endswith("mixer") else module(step, *inputs),)

    def _values(self, rows: tuple[Row, ...], records: list[Record]) -> Values:
        """The reference's calls cut to a step's tokens."""

        def cut(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([part[row.start : row.start + row.count] for part, row in zip(parts, rows, strict=True)])

        def values(path: str) -> Call:
            calls = [records[row.sequence][path] for row in rows]
            inputs = tuple(
                None if parts[0] is None else cut(list(parts))
                for parts in zip(*(call.inputs for call in calls), strict=True)
            )
            outputs = tuple(cut(list(parts)) for parts in zip(*(call.outputs for call in calls), strict=True))
            gaps = [call.gap for call in calls if call.gap is not None]
            return Call(inputs, outputs, cut(gaps) if len(gaps) == len(calls) else None)

        return values

    def _cast(self, value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.to(self.dtype)


def _stream(carry: Carry) -> torch.Tensor:
    """The residual stream with what the last block adds to it, in float32."""
    return carry.residual.float() if carry.hidden is None else carry.residual.float() + carry.hidden.float()


def failure_of(error: Exception) -> str:
    """What a module raised, in a line."""
    return f"{type(error).__name__}: {error}"
