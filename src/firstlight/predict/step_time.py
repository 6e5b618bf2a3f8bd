"""The time of a step: each kernel at its share of the roofline, its start, and what is sent that nothing hides.

`StepModel` prices one model on one GPU and mesh, for any number of step shapes at once. A mixed step is one batch: its
products see all tokens together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from firstlight.hardware import Hardware
from firstlight.hardware.calibration import Table
from firstlight.parallel import Mesh
from firstlight.predict import constants, links, overlap
from firstlight.predict.calibrated import CalibratedKernel, calibrated_kernel, find
from firstlight.predict.constants import HEAVY_START
from firstlight.predict.efficiency import GRID, Curve, curve, flat, sustained
from firstlight.predict.floor import (
    CHUNK,
    chunk_seconds,
    expert_row_bytes,
    multiplied,
    padded,
    padded_experts,
    peak,
    product_bytes,
)  # fmt: skip
from firstlight.predict.kernel_time import KernelTime
from firstlight.predict.kernels import INDEX, Kernel, kernels_of
from firstlight.predict.shape import Numbers, Part, StepShape, distinct_experts
from firstlight.predict.walk import VARIABLES, WalkedModel

DEFAULTS = {
    "product": constants.MATRIX_PEAK,
    "experts": constants.MATRIX_PEAK,
}
"""Efficiency where nothing was measured; those of attention and states differ between decode (bytes) and prefill."""


def weight_form(kernel: Kernel) -> str:
    """The format that a product's or experts' rows in tables have: its weights' where those are 4 bits, else its multiply's."""
    return kernel.dims.format if kernel.dims.format == "mxfp4" else kernel.dtype


def _rows_of(kernel: Kernel) -> str:
    """Which rows of a step a kernel sees: its label, or "logits" for those after the last layer."""
    return kernel.label or ("logits" if (kernel.flops + kernel.moved)[INDEX["logits"]] else "")


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a step is run.

    graph: replayed from a graph, so the host launches nothing. skew: of routing, see `distinct_experts`. two_batch_overlap:
    the step is cut in two halves, and what one sends is hidden behind what the other computes. tuned: kernels of a well-kept
    engine; False: the providers that are bound here.
    """

    graph: bool = True
    skew: float = 0.0
    two_batch_overlap: bool = False
    tuned: bool = True


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, the same with an 80 % interval, the least possible, and what they are made of."""

    seconds: Numbers
    low: Numbers
    high: Numbers
    floor: Numbers
    kernels: tuple[KernelTime, ...]
    overhead: Numbers
    hidden: Numbers

    @property
    def origins(self) -> dict[str, float]:
        """Share of the time by where efficiencies come from."""
        total: dict[str, float] = {}
        for item in self.kernels:
            total[item.origin] = total.get(item.origin, 0.0) + float(np.sum(item.seconds))
        whole = sum(total.values()) or 1.0
        return {origin: seconds / whole for origin, seconds in sorted(total.items(), key=lambda pair: -pair[1])}


@dataclass(frozen=True)
class StepModel:
    """Prices steps of a walked model on a GPU.

    table: of the providers that are bound here, for conditions that ask for them; kernels that it doesn't have are priced as a
    tuned engine's.
    """

    model: WalkedModel
    hardware: Hardware
    mesh: Mesh = field(default_factory=Mesh)
    conditions: Conditions = field(default_factory=Conditions)
    table: Table | None = None

    @cached_property
    def _kernels(self) -> list[tuple[Kernel, Curve]]:
        choices = None if self.conditions.tuned else self.model.choices or {}
        kernels = kernels_of(
            self.model,
            self.hardware,
            choices,
            exchanged=self.mesh.ep.size > 1,
            measured=lambda kernel: self._calibrated(kernel) is not None,
        )
        kernels += links.expert_exchange(self.model, self.mesh, kernels)
        curves = [self._curve(kernel) for kernel in kernels]
        if any(found.includes == "activation" for found in curves):  # timed with the products of experts
            pairs = [pair for pair in zip(kernels, curves, strict=True) if pair[0].name != "around experts"]
        else:
            pairs = list(zip(kernels, curves, strict=True))
        return pairs

    def _curve(self, kernel: Kernel) -> Curve:
        default = DEFAULTS.get(kernel.kind, constants.ELEMENTWISE_BANDWIDTH)
        if kernel.kind in ("attention", "state"):
            prefill = constants.ATTENTION_PEAK if kernel.kind == "attention" else constants.CHUNK_PEAK
            default = constants.STREAM_BANDWIDTH if kernel.label == "decode" else prefill
        if kernel.kind == "collective":
            return curve("all_reduce", "", self.hardware, "bfloat16", kernel.dims.sizes, constants.LINK_SHARE)
        if kernel.kind in ("elementwise", "dispatch", "combine"):
            return flat(default)
        label = kernel.label if kernel.kind in ("attention", "state") else ""
        op = "experts" if kernel.kind == "experts" else kernel.op
        form = kernel.dims.format if kernel.kind in ("attention", "state") else weight_form(kernel)
        return curve(op, label, self.hardware, form, kernel.dims.sizes, default)

    def time(self, shape: StepShape) -> StepTime:
        """The time of each step of `shape`."""
        if self.conditions.two_batch_overlap and self.mesh.ep.size > 1:
            return self._overlapped(shape)
        return self._sum(self._items(shape), hidden=np.zeros(1))

    def _overlapped(self, shape: StepShape) -> StepTime:
        """The step cut in two halves; see `overlap`."""
        prefills = shape.prefill.tokens > 0
        taken = constants.COMMUNICATION_PROCESSORS / self.hardware.multiprocessors if np.any(prefills) else 0.0
        halves = self._items(overlap.halved(shape), processors=1.0 - taken)
        memory = self.hardware.bandwidth * constants.STREAM_BANDWIDTH
        whole = overlap.seconds(halves, self.model.layers, self.model.sparse_layers, prefills, memory)
        items = [
            replace(item, seconds=item.seconds * 2, floor=item.floor * 2, flops=item.flops * 2, moved=item.moved * 2)
            for item in halves
        ]
        return self._sum(items, hidden=np.sum([item.seconds for item in items], axis=0) - whole)

    def _items(self, shape: StepShape, processors: float = 1.0) -> list[KernelTime]:
        """processors: share of the GPU's processors that compute."""
        variables: dict[tuple[str, int], Numbers] = {}
        items = []
        for kernel, efficiency in self._kernels:
            key = (kernel.label, kernel.dims.limit)
            if key not in variables:
                variables[key] = self._variables(shape, *key)
            items.append(self._item(kernel, efficiency, shape, variables[key], processors))
        return self._heated(items)

    def _variables(self, shape: StepShape, label: str, limit: int) -> Numbers:
        """[variables, shapes]: what a kernel's coefficients are multiplied by."""
        part: Part = shape.part(label)
        keys, pairs = part.limited(limit) if limit else (part.keys, part.pairs)
        values = {
            "one": (part.tokens > 0).astype(np.float64),
            "decode_tokens": shape.decode.tokens,
            "decode_requests": shape.decode.requests,
            "prefill_tokens": shape.prefill.tokens,
            "prefill_requests": shape.prefill.requests,
            "logits": shape.logits,
            "keys": keys,
            "pairs": pairs,
            "distinct": self._distinct(shape),
            "longest": shape.prefill.longest,
        }
        return np.stack(np.broadcast_arrays(*(np.atleast_1d(values[name]) for name in VARIABLES)))

    def _distinct(self, shape: StepShape) -> Numbers:
        """Share of a rank's experts that are used; every attention replica brings its tokens."""
        if not self.model.experts:
            return np.zeros(np.shape(shape.tokens))
        tokens = shape.tokens * (self.mesh.dp.size if self.mesh.ep.size > 1 else 1)
        return distinct_experts(self.model.experts, self.model.top_k, tokens, self.conditions.skew)

    def _item(
        self, kernel: Kernel, efficiency: Curve, shape: StepShape, variables: Numbers, processors: float
    ) -> KernelTime:
        flops, moved = (vector @ variables for vector in (kernel.flops, kernel.moved))
        if kernel.kind in ("collective", "dispatch", "combine"):
            sent = kernel.sent @ variables
            seconds, floor = links.seconds(kernel, sent, self.hardware, self.mesh, shape, efficiency)
            bound: Sequence[str] = ["link"] * len(seconds)
            return self._total(kernel, efficiency, sent, seconds, floor, flops, moved, bound)
        memory, compute = self._sides(kernel, flops, moved)
        floor = np.maximum(memory, compute)
        bound = [str(side) for side in np.where(memory >= compute, "memory", "compute")]
        active = (moved > 0) | (flops > 0)
        size = np.ones(1)
        if found := self._calibrated(kernel):
            work = found.seconds(shape, _rows_of(kernel), floor)
        elif kernel.kind == "elementwise":
            work = memory / constants.ELEMENTWISE_BANDWIDTH + constants.SMALL_KERNEL * kernel.launches * active
        else:
            size = self._size(kernel, flops, variables)
            work = self._work(kernel, efficiency, size, flops, moved, variables, processors)
        seconds = np.maximum(work, floor)
        return self._total(kernel, efficiency, size, seconds, floor, flops, moved, bound)

    def _total(
        self, kernel: Kernel, efficiency: Curve, size: Numbers, seconds: Numbers, floor: Numbers, flops: Numbers,
        moved: Numbers, bound: Sequence[str],
    ) -> KernelTime:  # fmt: skip
        n = kernel.count
        if kernel.kind == "experts":
            size = size * kernel.dims.sizes["top_k"] / kernel.dims.sizes["experts"]
        origin, spread, source = efficiency.trust(size)
        if found := self._calibrated(kernel):
            origin, spread, source = "interpolated", found.spread, f"{found.provider} on {found.gpu}"
        return KernelTime(kernel, seconds * n, floor * n, flops * n, moved * n, bound, origin, spread, source)

    @staticmethod
    def _size(kernel: Kernel, flops: Numbers, variables: Numbers) -> Numbers:
        """What a kernel's efficiency depends on: tokens of a product, experts or prompts, keys of a decode, rows of states."""
        sizes = kernel.dims.sizes
        if kernel.kind == "product":
            return flops / (2.0 * sizes["rows"] * sizes["columns"])
        if kernel.kind == "experts":
            return flops / (6.0 * sizes["hidden"] * sizes["intermediate"] * sizes["top_k"])
        if kernel.label == "prefill":
            tokens = variables[INDEX["prefill_tokens"]]
            return (
                tokens if kernel.kind == "attention" else tokens / np.maximum(variables[INDEX["prefill_requests"]], 1)
            )
        return variables[INDEX["keys" if kernel.kind == "attention" else "decode_requests"]]

    def _work(
        self,
        kernel: Kernel,
        efficiency: Curve,
        size: Numbers,
        flops: Numbers,
        moved: Numbers,
        variables: Numbers,
        processors: float,
    ) -> Numbers:
        """Seconds of a heavy kernel: a start, then its roofline at its efficiency."""
        active = (flops > 0) | (moved > 0)
        start = HEAVY_START[kernel.kind] * kernel.launches * active
        if kernel.kind in ("product", "experts"):
            times = self._curve_of_times(kernel, efficiency, processors)
            return (np.exp(np.interp(np.log2(np.maximum(size, 1.0)), np.log2(GRID), times)) + start) * active
        dtype = kernel.dtype or "float32"
        rate = peak(self._sustained, dtype) * processors
        if kernel.kind == "state" and kernel.label == "prefill":
            memory = moved / self.hardware.bandwidth / constants.STREAM_BANDWIDTH
            chain = self._chain(kernel, variables) / processors
            return np.maximum(chain / efficiency.at(size), memory) + HEAVY_START["chunks"] * active
        memory, beside = moved / self.hardware.bandwidth, np.zeros_like(moved)
        if (
            kernel.kind == "attention" and kernel.label == "decode"
        ):  # queries and results, however long the contexts are
            cached = kernel.moved[INDEX["keys"]] * variables[INDEX["keys"]] / self.hardware.bandwidth
            memory, beside = cached, (memory - cached) / constants.STREAM_BANDWIDTH
        query = variables[INDEX["prefill_tokens"]] / np.maximum(variables[INDEX["prefill_requests"]], 1)
        return np.maximum(flops / rate, memory) / efficiency.at(size, query) + beside + start

    def _chain(self, kernel: Kernel, variables: Numbers) -> Numbers:
        """Least seconds of the chains of chunks of a prefill's states: the longest request's, or queues of all heads."""
        sizes = kernel.dims.sizes
        chunk = chunk_seconds(sizes["value_dim"], sizes["key_dim"], self._sustained)
        requests = np.maximum(variables[INDEX["prefill_requests"]], 1)
        queue = np.maximum(np.ceil(requests * sizes["heads"] / self.hardware.multiprocessors - 1e-9), 1.0)
        chunks = variables[INDEX["prefill_tokens"]] / CHUNK
        return np.maximum(kernel.chain @ variables, queue * chunks / requests) * chunk

    def _curve_of_times(self, kernel: Kernel, efficiency: Curve, processors: float) -> Numbers:
        """ln(seconds) of a product over GRID tokens: it depends on nothing else. It never falls as tokens are added."""
        key = (id(kernel), processors)
        if key not in self._times:
            sizes = kernel.dims.sizes
            form = multiplied(weight_form(kernel), self.hardware)
            rate = peak(self._sustained, form) * processors
            moved = np.full_like(GRID, kernel.moved[0])
            if kernel.kind == "product":
                moved = moved + GRID * product_bytes(sizes["rows"], sizes["columns"], form)
                operations = padded(GRID) * 2.0 * sizes["rows"] * sizes["columns"]
                size = GRID
            else:
                replicas = self.mesh.dp.size if self.mesh.ep.size > 1 else 1
                used = distinct_experts(self.model.experts, self.model.top_k, GRID * replicas, self.conditions.skew)
                moved = moved + used * kernel.moved[INDEX["distinct"]]
                assignments = GRID * sizes["top_k"]
                moved = moved + assignments * expert_row_bytes(sizes["hidden"], sizes["intermediate"], form)
                rows = padded_experts(assignments, used * sizes["experts"])
                operations = rows * 6.0 * sizes["hidden"] * sizes["intermediate"]
                size = assignments / sizes["experts"]
            times = np.maximum(operations / rate, moved / self.hardware.bandwidth) / efficiency.at(size)
            self._times[key] = np.log(np.maximum.accumulate(times))
        return self._times[key]

    def _sides(self, kernel: Kernel, flops: Numbers, moved: Numbers) -> tuple[Numbers, Numbers]:
        """Seconds of a kernel's bytes and of its operations at the datasheet's rates."""
        # States are kept in float32, but chunks of tokens are multiplied by the matrix units.
        dtype = "bfloat16" if kernel.kind == "state" else kernel.dtype or "float32"
        return moved / self.hardware.bandwidth, flops / peak(self.hardware, dtype)

    def calibrated_share(self, shape: StepShape) -> float:
        """Share of a step's time that rows of the providers bound here stand behind."""
        items = self.time(shape).kernels
        own = sum(float(item.seconds[0]) for item in items if self._calibrated(item.kernel))
        return own / sum(float(item.seconds[0]) for item in items)

    def _calibrated(self, kernel: Kernel) -> CalibratedKernel | None:
        """The rows of a kernel's provider in the calibrated table, if there are any."""
        if self.table is None or not kernel.call or kernel.sizes is None:
            return None
        key = (kernel.call, kernel.label, kernel.provider, kernel.sizes.key, _rows_of(kernel))
        if key not in self._found:
            groups = find(self.table, kernel.call, kernel.label, kernel.provider, kernel.sizes)

            def floor_of(shape: StepShape) -> Numbers:
                variables = self._variables(shape, kernel.label, kernel.dims.limit)
                return np.maximum(*self._sides(kernel, kernel.flops @ variables, kernel.moved @ variables))

            self._found[key] = calibrated_kernel(groups, kernel.label, floor_of)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[object, ...], CalibratedKernel | None]:
        return {}

    @cached_property
    def _sustained(self) -> Hardware:
        return sustained(self.hardware)

    def _heated(self, items: list[KernelTime]) -> list[KernelTime]:
        """The kernels of a step at the clock that it leaves.

        The more of a step's least time is bound by the matrix units, the more power it takes, and the less of their rate is left
        where power is what limits it.
        """
        whole = np.sum([item.floor for item in items if item.bound[0] != "link"], axis=0)
        computing = [np.array([side == "compute" for side in item.bound]) for item in items]
        heat = np.sum([item.floor * busy for item, busy in zip(items, computing, strict=True)], axis=0)
        slower = heat / np.where(whole > 0, whole, 1.0) * (1 / constants.SUSTAINED_CLOCK - 1)
        return [
            replace(item, seconds=item.seconds * (1 + slower * busy)) if self._power_limited(item.kernel) else item
            for item, busy in zip(items, computing, strict=True)
        ]

    def _power_limited(self, kernel: Kernel) -> bool:
        dtype = "bfloat16" if kernel.kind == "state" else multiplied(weight_form(kernel), self.hardware) or "float32"
        return peak(self._sustained, dtype) < constants.POWER_LIMITED * peak(self.hardware, dtype)

    @cached_property
    def _times(self) -> dict[tuple[int, float], Numbers]:
        return {}

    def _sum(self, items: list[KernelTime], hidden: Numbers) -> StepTime:
        total = np.sum([item.seconds for item in items], axis=0)
        launches = np.sum([item.kernel.launches * item.kernel.count * (item.seconds > 0) for item in items], axis=0)
        hidden = np.broadcast_to(hidden, total.shape)
        computed = total - hidden
        if not self.conditions.graph:
            computed = np.maximum(computed, launches * constants.EAGER_LAUNCH)
        overhead = np.full_like(total, constants.STEP_START)
        seconds = computed + overhead
        floor = np.sum([item.floor for item in items if item.bound[0] != "link"], axis=0)
        spread = self._spread(items, seconds)
        reach = np.exp(constants.QUANTILE_80 * spread)
        return StepTime(
            seconds, np.maximum(seconds / reach, floor), seconds * reach, floor, tuple(items), overhead, hidden
        )

    @staticmethod
    def _spread(items: list[KernelTime], seconds: Numbers) -> Numbers:
        """Standard deviation of ln(step): kernels of one op err together, ops err apart."""
        by_op: dict[str, Numbers] = {}
        for item in items:
            by_op[item.kernel.op] = by_op.get(item.kernel.op, np.zeros(1)) + item.seconds * item.spread
        variance = np.sum([np.square(value) for value in by_op.values()], axis=0) / np.square(seconds)
        return np.sqrt(variance + constants.STEP_SPREAD**2)
