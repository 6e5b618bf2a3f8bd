"""The observer: at every call that the model makes, each provider is checked against the reference, then timed.

A composite's parts are visited first, on what they really get; then its own providers, and the composite made of the best
parts. What an op writes in place is put back before each provider runs, and is the reference's when the model goes on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from firstlight.calibrate.check import disagreement, flatten
from firstlight.calibrate.timing import CaptureError, once, seconds_of
from firstlight.calibrate.workload import Workload, identity
from firstlight.engine.graphs import DRAWS
from firstlight.hardware import Hardware
from firstlight.ops.binding import PARTS
from firstlight.ops.meta import without_data
from firstlight.ops.observe import Bound, observed
from firstlight.ops.op import REFERENCE, Call, Op, Provider, Shape
from firstlight.ops.sample import sample
from firstlight.ops.sizes import Sizes, sizes_of
from firstlight.ops.write_kv import bits_of
from firstlight.quant import LAYOUTS, Packed, format_of, repack
from firstlight.step import StepBatch

logger = logging.getLogger(__name__)

COLD_CACHES = 3
"""Calls in turn read this many times the L2 cache before they come back to what they read first."""
MOST_COPIES = 64
COPY_BYTES = 8 << 30
"""Copies of the weights of one call, at most."""
SLOW_REFERENCE = 0.02
"""Seconds; a reference that nobody replaces is timed up to here."""
SCRATCH_SLACK = 1 << 20
"""What a provider may take beyond its declared scratch memory before it is reported."""

Key = tuple[Any, ...]


@dataclass(slots=True)
class Result:
    """What came out for one provider at one call. seconds: 0.0 if it was refused, with the reason."""

    op: str
    label: str
    provider: str
    sizes: Sizes
    seconds: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class Scratch:
    """A provider that took more scratch memory than it declares: the largest excess, and the call."""

    used: int
    declared: int
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest so far at a call. packs: whether it reads weights in a layout of its own, which composites don't pass on."""

    run: Callable[..., Any]
    seconds: float
    packs: bool = False


@dataclass(slots=True)
class Job:
    """A provider at a call: what it runs on. args and kwargs hold its weights in the layout that it reads."""

    provider: Provider
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.provider.run(*self.args, **self.kwargs)


class Sweep:
    """Attached to a model while it runs the steps of a workload; collects results."""

    def __init__(self, workload: Workload, hardware: Hardware, only: frozenset[str] = frozenset()) -> None:
        """only: ops to measure; empty: all."""
        self.workload, self.hardware, self.only = workload, hardware, only
        self.device = workload.device
        self.results: list[Result] = []
        self.scratch: dict[tuple[str, str], Scratch] = {}
        self.best: dict[Key, Best] = {}
        self._seen: set[Key] = set()
        self._warmed: set[Key] = set()
        self._jobs: list[Job] = []
        self._copies: dict[tuple[Any, ...], list[Tensor]] = {}
        self._step: StepBatch | None = None

    # Steps

    def warm_up(self, step: StepBatch) -> None:
        """Run every provider of a step once, side by side, so that kernels are compiled on all cores.

        What the ops give is zeros, so caches are left in disorder: fill them afterwards.
        """
        self._step = step
        self._run(step, self._collect)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # other streams read what this one has written
        workers = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        for job in self._jobs[:1]:  # sets up what threads would otherwise set up at once
            self._warm(job)
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(self._warm, self._jobs[1:]))
        self._jobs.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def measure(self, step: StepBatch) -> None:
        """Check and time every provider of every call of a step that wasn't met before."""
        self._step = step
        self._run(step, self._visit)
        self._copies.clear()

    def _run(self, step: StepBatch, visit: Callable[..., Any]) -> None:
        def observe(bound: Bound, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            label = bound.label if bound.label in ("decode", "prefill") else ""
            return visit(bound.op, label, *args, **kwargs)

        with torch.inference_mode(), observed(self.workload.model, observe):
            logits = self.workload.model(step)
            draw = self.workload.sampling(step)
            for greedy, filtered in DRAWS:
                visit(sample, "", logits, *draw, greedy=greedy, filtered=filtered)

    # Warming up

    def _warm(self, job: Job) -> None:
        try:
            with torch.inference_mode():
                if self.device.type != "cuda":
                    job()
                    return
                with torch.cuda.stream(torch.cuda.Stream()):
                    job()
                    torch.cuda.current_stream().synchronize()
        except Exception as error:  # met again when it is checked, and kept as the reason there
            logger.debug("%s of %s: %s", job.provider.name, job.provider.op.name, error)

    def _collect(self, op: Op, label: str, *args: Any, **kwargs: Any) -> Any:
        if op.parts:
            op.compose({name: partial(self._collect, part, label) for name, part in op.parts.items()})(*args, **kwargs)
        key = self._key(op, label, args, kwargs)
        if key not in self._warmed and self._wanted(op):
            self._warmed.add(key)
            self._jobs += [job for _, job in self._willing(op, args, kwargs)]
        return _zeros(op.abstract(*args, **kwargs), self.device)

    # Measuring

    def _visit(self, op: Op, label: str, *args: Any, **kwargs: Any) -> Any:
        key = self._key(op, label, args, kwargs)
        if key in self._seen:
            return self._again(op, label, key, args, kwargs)
        self._seen.add(key)
        rows = _Written(op, op.signature.bind(*args, **kwargs).arguments)
        if op.parts:
            parts = {name: partial(self._visit, part, label) for name, part in op.parts.items()}
            result = op.compose(parts)(*args, **kwargs)
        else:
            result = op.body(*args, **kwargs)
        if not self._wanted(op):
            return result
        expected = [tensor.clone() for tensor in flatten(result)] + rows.now()
        sizes = sizes_of(op, args, kwargs)
        for provider, job in self._willing(op, args, kwargs):
            self._measure(op, label, sizes, key, provider, job, rows, expected)
        if op.parts:
            self._measure_parts(op, label, sizes, key, args, kwargs, rows)
        elif not any(r.op == op.name and r.sizes.key == sizes.key and r.label == label for r in self.results):
            self._measure_reference(op, label, sizes, key, args, kwargs, rows)
        rows.put(expected[len(flatten(result)) :])
        return result

    def _again(self, op: Op, label: str, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that was measured before, in another step: its fastest provider will do."""
        best = self.best.get(key)
        if best is None or best.packs:
            return op.reference(*args, **kwargs)
        return best.run(*args, **kwargs)

    def _wanted(self, op: Op) -> bool:
        return not self.only or op.name in self.only

    def _key(self, op: Op, label: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
        return (op.name, label, *sizes_of(op, args, kwargs).key)

    def _willing(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Provider, Job]]:
        """Providers that can serve a call, lossy ones included, with what each would run on."""
        assert self._step is not None
        call = Call(args, kwargs, self.workload.bucket_of(self._step), self.hardware)
        found = []
        for provider in op.providers.values():
            if provider.when(call) is None and (job := self._job(provider, args, kwargs)) is not None:
                found.append((provider, job))
        return found

    def _job(self, provider: Provider, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job | None:
        """The call with its weights as the provider wants them laid out; None if one of them can't be."""
        if not provider.layout:
            return Job(provider, args, kwargs)
        bound = provider.op.signature.bind(*args, **kwargs)
        for name, layout in provider.layout.items():
            weight = bound.arguments.get(name)
            if weight is None:
                continue
            if layout in LAYOUTS and LAYOUTS[layout].accepts(format_of(weight), tuple(weight.shape)) is not None:
                return None
            bound.arguments[name] = repack(weight, layout)
        return Job(provider, bound.args, bound.kwargs)

    def _measure(
        self,
        op: Op,
        label: str,
        sizes: Sizes,
        key: Key,
        provider: Provider,
        job: Job,
        rows: _Written,
        expected: list[Tensor],
    ) -> None:
        result = Result(op.name, label, provider.name, sizes)
        self.results.append(result)
        rows.put_back()
        try:
            actual = self._observed_scratch(provider, job, sizes, rows)
            found = [tensor.clone() for tensor in flatten(actual)] + rows.now()
            packed = any(isinstance(value, Packed) for value in (*job.args, *job.kwargs.values()))
            precision = getattr(torch, sizes.dtype, torch.float32)
            if reason := disagreement(op.name, found, expected, precision, packed):
                result.reason = reason
                return
            result.seconds = seconds_of(self._cold(op, job.provider.run, job.args, job.kwargs), self.device)
        except CaptureError as error:
            result.reason = str(error)
            return
        except Exception as error:
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost: every later call would fail as well
            result.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return
        finally:
            rows.put_back()
        if not provider.lossy:
            self._note(key, provider.run, result.seconds, packs=bool(provider.layout))

    def _note(self, key: Key, run: Callable[..., Any], seconds: float, packs: bool = False) -> None:
        if key not in self.best or seconds < self.best[key].seconds:
            self.best[key] = Best(run, seconds, packs)

    def _measure_parts(
        self,
        op: Op,
        label: str,
        sizes: Sizes,
        key: Key,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: _Written,
    ) -> None:
        """The composite made of its fastest parts, if each call inside was timed.

        A part that is called several times has one provider, as when it is bound: that of its longest call.
        """
        chosen: dict[str, Best] = {}
        complete = True

        def part(name: str, inner: Op, *part_args: Any, **part_kwargs: Any) -> Any:
            nonlocal complete
            best = self.best.get(self._key(inner, label, part_args, part_kwargs))
            if best is None or best.packs:
                complete = False
                return inner.reference(*part_args, **part_kwargs)
            if name not in chosen or best.seconds > chosen[name].seconds:
                chosen[name] = best
            return best.run(*part_args, **part_kwargs)

        rows.put_back()
        op.compose({name: partial(part, name, inner) for name, inner in op.parts.items()})(*args, **kwargs)
        if not complete:
            return
        result = Result(op.name, label, PARTS, sizes)
        self.results.append(result)
        composed = op.compose(
            {name: chosen[name].run if name in chosen else inner.reference for name, inner in op.parts.items()}
        )
        try:
            result.seconds = seconds_of(self._cold(op, composed, args, kwargs), self.device)
            self._note(key, composed, result.seconds)
        except CaptureError as error:
            result.reason = str(error)
        finally:
            rows.put_back()

    def _measure_reference(
        self,
        op: Op,
        label: str,
        sizes: Sizes,
        key: Key,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: _Written,
    ) -> None:
        """The reference itself, where nobody else serves a call: what prediction has to count, and composites are made of."""
        rows.put_back()
        run = partial(op.reference, *args, **kwargs)
        if once(run, self.device) > SLOW_REFERENCE:
            return
        rows.put_back()
        result = Result(op.name, label, REFERENCE, sizes)
        try:
            result.seconds = seconds_of(self._cold(op, op.reference, args, kwargs), self.device)
            self._note(key, op.reference, result.seconds)
            self.results.append(result)
        except CaptureError:
            pass  # no candidate, so no reason is asked for
        finally:
            rows.put_back()

    def _observed_scratch(self, provider: Provider, job: Job, sizes: Sizes, rows: _Written) -> Any:
        """Run once; on a GPU, note scratch memory beyond what the provider declares."""
        if self.device.type != "cuda":
            return job()
        job()  # what is made once (tickets, loaded kernels) isn't scratch
        rows.put_back()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        actual = job()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device)
        used = peak - before - sum(tensor.untyped_storage().nbytes() for tensor in flatten(actual))
        assert self._step is not None
        call = Call(job.args, job.kwargs, self.workload.bucket_of(self._step), self.hardware)
        declared = provider.workspace(call) if provider.workspace else 0
        place = (provider.op.name, provider.name)
        if used > declared + SCRATCH_SLACK:
            held = self.scratch.get(place)
            if held is None or used - declared > held.used - held.declared:
                self.scratch[place] = Scratch(used, declared, sizes)
        return actual

    # Cold calls

    def _cold(
        self, op: Op, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Callable[[], Any]]:
        """The call, and as many of its like as it takes to leave the L2 cache; each has run once."""
        touched = self._touched(op, args, kwargs)
        count = max(1, min(MOST_COPIES, -(-COLD_CACHES * self.hardware.l2 // max(touched, 1))))
        weights = sum(_nbytes(value) for value in (*args, *kwargs.values()) if self._is_weight(value))
        copies = max(1, min(count, COPY_BYTES // max(weights, 1)))
        calls: list[Callable[[], Any]] = [
            partial(
                run,
                *(self._sibling(value, i, copies) for value in args),
                **{name: self._sibling(value, i, copies) for name, value in kwargs.items()},
            )
            for i in range(count)
        ]
        for call in calls:
            call()
        return calls

    def _touched(self, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Bytes that a call moves at least."""
        assert self._step is not None
        bucket, model = self._step.bucket, self.workload.model.config
        share = 1.0
        if model.num_experts:
            share = 1 - (1 - model.num_experts_per_tok / model.num_experts) ** bucket.tokens
        shape = Shape(
            bucket.tokens, bucket.requests, bucket.requests * bucket.context, bucket.tokens * bucket.context, share
        )
        meta_args = tuple(without_data(value) for value in args)
        cost = op.cost(shape, *meta_args, **{name: without_data(value) for name, value in kwargs.items()})
        return int(cost.read + cost.written)

    def _is_weight(self, value: Any) -> bool:
        if isinstance(value, Packed):
            return True
        return isinstance(value, Tensor) and identity(value) in self.workload.weights

    def _sibling(self, value: Any, number: int, copies: int) -> Any:
        """What stands in for an argument in the call with this number."""
        if isinstance(value, Packed):
            parts = {name: self._copy(part, number % copies) for name, part in value.parts.items()}
            return replace(value, parts=parts)
        if not isinstance(value, Tensor):
            return value
        if self._is_weight(value):
            return self._copy(value, number % copies)
        siblings = self.workload.siblings(value)
        return siblings[number % len(siblings)]

    def _copy(self, tensor: Tensor, number: int) -> Tensor:
        """A copy of a weight; number 0 is itself. Copies are kept for the providers that follow."""
        copies = self._copies.setdefault(identity(tensor), [tensor])
        if len(copies) == 1 and sum(t.nbytes for held in self._copies.values() for t in held[1:]) > 2 * COPY_BYTES:
            self._copies = {identity(tensor): copies}
        while len(copies) <= number:
            copies.append(tensor.clone())
        return copies[number]


@dataclass(slots=True)
class _Written:
    """The rows that a call writes in place, as they are before it."""

    op: Op
    given: Mapping[str, Any]
    before: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = self.now()

    def _places(self) -> list[tuple[Tensor, tuple[Tensor, ...] | None]]:
        """(tensor, index of its rows), None: all of it."""
        found: list[tuple[Tensor, tuple[Tensor, ...] | None]] = []
        for name, selector in self.op.mutates.items():
            tensor = self.given.get(name)
            if not isinstance(tensor, Tensor):
                continue
            if not selector:
                found.append((tensor, None))
                continue
            chosen = self.given[selector].flatten().long().clamp(min=0)
            if selector == "slot":  # page * page_size + offset
                found.append((tensor, (chosen // tensor.shape[1], chosen % tensor.shape[1])))
            else:
                found.append((tensor, (chosen,)))
        return found

    def now(self) -> list[Tensor]:
        """Copies of the rows as they are."""
        return [
            tensor.clone() if index is None else bits_of(tensor)[index].view(tensor.dtype)
            for tensor, index in self._places()
        ]

    def put(self, values: list[Tensor]) -> None:
        """Write rows."""
        for (tensor, index), value in zip(self._places(), values, strict=True):
            if index is None:
                tensor.copy_(value)
            else:
                bits_of(tensor)[index] = bits_of(value)

    def put_back(self) -> None:
        """The rows as they were before the call."""
        self.put(self.before)


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor | Packed) else 0


def _zeros(value: Any, device: torch.device) -> Any:
    """An abstract result with zeros in it."""
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, tuple):
        return tuple(_zeros(item, device) for item in value)
    return value
