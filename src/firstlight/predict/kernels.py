"""From walked calls to kernels: which calls run as one, and what kernels do beside the floor of their op.

An op's cost says what any implementation must do. A kernel of a well-kept engine does a little more: it quantises
activations for FP8 products, sorts tokens by expert, writes what lies between two products of an expert. That is added
here, once, for all models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from firstlight.hardware import Hardware
from firstlight.ops.binding import PARTS
from firstlight.ops.op import REFERENCE
from firstlight.ops.sizes import Sizes
from firstlight.predict import constants
from firstlight.predict.dims import Dims
from firstlight.predict.shape import Numbers
from firstlight.predict.walk import BASE, VARIABLES, WalkedCall, WalkedModel

INDEX = {name: i for i, name in enumerate(VARIABLES)}
TAKEN_APART = frozenset({"moe"})
"""Composites whose parts are kernels of their own in every engine."""
FUSED_IN_DECODE = frozenset({"gated_delta", "channel_delta"})
"""Composites that are one kernel for decode rows, and several for prefill rows."""
HEAVY = {
    "linear": "product",
    "experts": "experts",
    "clamped_experts": "experts",
    "attention": "attention",
    "latent_attention": "attention",
    "select_keys": "attention",
    "gated_delta_rule": "state",
    "channel_delta_rule": "state",
}
"""Ops whose kernels have efficiencies of their own; the others are bound by bytes."""


MAKES_NO_FLOAT8 = frozenset({"attention", "state", "experts"})
"""Kinds of kernels whose result is quantised by a kernel of its own where an FP8 product reads it. Elementwise ones (norms,
activations) write FP8 themselves in well-kept engines, and a product after a product reads the same input."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, or a few that start one after another.

    name: for tables. op, label: whose efficiency it has. kind: "product", "experts", "attention", "state", "elementwise",
    "collective", "dispatch" or "combine". dtype: of the multiply. flops, moved, sent, chain: over VARIABLES. launches: kernels
    started each time. count: times a step. segment: "attention", "feed_forward" or "". provider, call, sizes: who computes it where
    providers are bound, the op that it is one call of, and that call's sizes.
    """

    name: str
    op: str
    label: str
    kind: str
    count: int
    dims: Dims
    dtype: str = ""
    flops: Numbers = field(default_factory=lambda: np.zeros(len(VARIABLES)))
    moved: Numbers = field(default_factory=lambda: np.zeros(len(VARIABLES)))
    sent: Numbers = field(default_factory=lambda: np.zeros(len(VARIABLES)))
    chain: Numbers = field(default_factory=lambda: np.zeros(len(VARIABLES)))
    launches: int = 1
    segment: str = ""
    provider: str = ""
    call: str = ""
    sizes: Sizes | None = None


def kernels_of(
    model: WalkedModel,
    hardware: Hardware,
    choices: Mapping[tuple[str, str], str] | None = None,
    exchanged: bool = False,
    measured: Callable[[Kernel], bool] = lambda kernel: False,
) -> list[Kernel]:
    """The kernels of a step.

    choices: providers bound in a bucket; None: those of a well-kept engine, fused where all are. exchanged: tokens come to
    experts from other ranks. measured: whether a kernel's whole call was, with all that runs beside its products.
    """
    found: list[Kernel] = []
    before: Kernel | None = None
    for _, group in groupby(model.calls, key=lambda call: _fused(call, choices) or id(call)):
        calls = list(group)
        collectives = [call for call in calls if call.cost["messages"].any() or call.cost["sent"].any()]
        calls = [call for call in calls if call not in collectives and _works(call)]
        found += [_collective(call) for call in collectives]
        if not calls:
            continue
        if len(calls) > 1:
            made = [_joined(calls, hardware, choices)]
        else:
            whole = _whole(calls[0], hardware, choices)
            made = [whole] if measured(whole) else list(_parts(whole, calls[0], exchanged, before))
        found += made
        before = made[0]
    return list(_merged(found))


def _works(call: WalkedCall) -> bool:
    return bool(call.cost["launches"].any())


def _fused(call: WalkedCall, choices: Mapping[tuple[str, str], str] | None) -> tuple[str, int] | None:
    """The occurrence of a composite whose parts are one kernel with this call's, if there is one."""
    for name, number in call.inside:
        if choices is not None:
            if _provided(call, name, choices):
                return name, number
        elif name not in TAKEN_APART and (name not in FUSED_IN_DECODE or call.label == "decode"):
            return name, number
    return None


def _segment(path: str) -> str:
    if not path.startswith("layers."):
        return ""
    return "feed_forward" if ".mlp" in path else "attention"


def _moved(call: WalkedCall) -> Numbers:
    return call.cost["read"] + call.cost["written"]


def _flops(call: WalkedCall) -> tuple[str, Numbers]:
    """The dtype that most operations are in, and all operations."""
    flops = {name.partition(":")[2]: value for name, value in call.cost.items() if name.startswith("flops:")}
    if not flops:
        return "", np.zeros(len(VARIABLES))
    return max(flops, key=lambda dtype: flops[dtype].sum()), np.sum(list(flops.values()), axis=0)


def _dtype(call: WalkedCall, hardware: Hardware) -> str:
    """What a product multiplies in: FP8 where weights and activations have scales a block and the hardware multiplies it."""
    dtype, _ = _flops(call)
    return call.dims.format if call.dims.block_scaled and call.dims.format in hardware.peak else dtype


def _bound(call: WalkedCall, choices: Mapping[tuple[str, str], str] | None) -> dict[str, Any]:
    """Who computes a call, or the composite that it is a part of."""
    if choices is None:
        return {}
    level = next((i for i, (name, _) in enumerate(call.inside) if _provided(call, name, choices)), len(call.inside))
    op = call.inside[level][0] if level < len(call.inside) else call.op
    return {"provider": choices.get((call.path, op), REFERENCE), "call": op, "sizes": call.sizes[level]}


def _provided(call: WalkedCall, name: str, choices: Mapping[tuple[str, str], str]) -> bool:
    return choices.get((call.path, name), REFERENCE) not in (PARTS, REFERENCE)


def _joined(calls: list[WalkedCall], hardware: Hardware, choices: Mapping[tuple[str, str], str] | None) -> Kernel:
    """Several calls as one kernel: what one passes on to the next never reaches memory."""
    first = calls[0]
    heavy = max((call for call in calls if call.op in HEAVY), key=_operations, default=first)
    kind = HEAVY.get(heavy.op, "elementwise")
    outer = first.inside[0][0]
    return Kernel(
        name=outer,
        op=heavy.op if kind != "elementwise" else outer,
        label=first.label,
        kind=kind,
        count=first.count,
        dims=heavy.dims,
        dtype=_dtype(heavy, hardware),
        flops=np.sum([_flops(call)[1] for call in calls], axis=0),
        moved=np.maximum(np.sum([_moved(call) - 2 * call.passed_on for call in calls], axis=0), 0.0),
        chain=np.sum([call.cost["chain"] for call in calls], axis=0)
        if kind == "state" and first.label == "prefill"
        else _zero(),
        segment=_segment(first.path),
        **_bound(first, choices),
    )


def _zero() -> Numbers:
    return np.zeros(len(VARIABLES))


def _operations(call: WalkedCall) -> float:
    """Operations in the step that models are walked at."""
    return float(_flops(call)[1] @ np.array([1.0, *(BASE[name] for name in VARIABLES[1:])]))


def _whole(call: WalkedCall, hardware: Hardware, choices: Mapping[tuple[str, str], str] | None) -> Kernel:
    """A call as one kernel."""
    kind = HEAVY.get(call.op, "elementwise")
    dtype = _dtype(call, hardware)
    return Kernel(
        name=_name(call),
        op=call.op,
        label=call.label,
        kind=kind,
        count=call.count,
        dims=call.dims,
        dtype=dtype,
        flops=_flops(call)[1],
        moved=_moved(call),
        chain=call.cost["chain"] if call.label == "prefill" else _zero(),
        segment=_segment(call.path),
        **_bound(call, choices),
    )


def _parts(kernel: Kernel, call: WalkedCall, exchanged: bool, before: Kernel | None) -> Iterator[Kernel]:
    """A call as kernels: the heavy one, and those beside it. before: the kernel that runs before them."""
    kind = kernel.kind
    quantises = call.dims.block_scaled and kernel.dtype == call.dims.format
    if call.op == "latent_attention":
        yield from _latent(kernel)
        return
    yield kernel
    if kind == "product" and quantises and before is not None and before.kind in MAKES_NO_FLOAT8:
        tokens = kernel.flops / (2.0 * call.dims.sizes["rows"] * call.dims.sizes["columns"])
        yield _elementwise(kernel, "quantise", tokens * call.dims.sizes["columns"] * 3.0)
    elif kind == "experts":
        yield _between_products(kernel, quantises, exchanged)


def _name(call: WalkedCall) -> str:
    """What people know a product by: its attribute in the checkpoint."""
    if call.op == "linear":
        if call.inside:
            return f"linear {call.dims.sizes['columns']} -> {call.dims.sizes['rows']}"
        return f"linear {call.path.split('.')[-2]}"
    if call.dims.limit:
        return f"{call.op} {call.label} ({call.dims.limit} keys)"
    return f"{call.op} {call.label}".strip()


def _elementwise(kernel: Kernel, name: str, moved: Numbers, launches: int = 1) -> Kernel:
    return replace(
        kernel,
        name=name,
        op=name,
        kind="elementwise",
        dims=Dims(),
        dtype="",
        flops=_zero(),
        chain=_zero(),
        moved=moved,
        launches=launches,
    )


def _between_products(kernel: Kernel, quantises: bool, exchanged: bool) -> Kernel:
    """Activation of the first product's result, sums of the second's, and the sorting of tokens by expert.

    Activations are quantised for the first product by a kernel of its own, for the second as they are made.
    """
    sizes = kernel.dims.sizes
    hidden, inner = sizes["hidden"], sizes["intermediate"]
    assignments = kernel.flops / (6.0 * hidden * inner)
    activation = inner * (4.0 + (1.0 if quantises else 2.0))
    summed = hidden * 2.0
    moved = assignments * activation
    launches = constants.EXCHANGED_EXPERT_LAUNCHES if exchanged else constants.EXPERT_LAUNCHES
    if not exchanged:
        moved = moved + assignments * summed + assignments / sizes["top_k"] * hidden * 2.0
    if quantises:
        moved = moved + assignments / sizes["top_k"] * hidden * 3.0
    return _elementwise(kernel, "around experts", moved, launches + (1 if quantises else 0))


def _latent(kernel: Kernel) -> Iterator[Kernel]:
    """Latent attention is its core, and products with the weight that widens latents to keys and values."""
    core, product = _zero(), kernel.flops.copy()
    core[INDEX["pairs"]], product[INDEX["pairs"]] = kernel.flops[INDEX["pairs"]], 0.0
    weight = _zero()
    weight[0] = kernel.moved[0]  # what is read whatever the step: the weight
    sizes = {"rows": kernel.dims.sizes["rows"], "columns": kernel.dims.sizes["columns"]}
    yield replace(kernel, flops=core, moved=kernel.moved - weight)
    yield replace(
        kernel,
        name="widen latents" if kernel.label == "prefill" else "absorb",
        op="linear",
        kind="product",
        dims=Dims(sizes, "bfloat16", limit=kernel.dims.limit),
        dtype="bfloat16",
        flops=product,
        moved=weight,
        chain=_zero(),
        launches=2 if kernel.label == "decode" else 1,
    )


def _collective(call: WalkedCall) -> Kernel:
    return Kernel(
        name=call.op,
        op=call.op,
        label=call.label,
        kind="collective",
        count=call.count,
        dims=call.dims,
        moved=_moved(call),
        sent=call.cost["sent"],
        segment=_segment(call.path),
    )


def _merged(kernels: list[Kernel]) -> Iterator[Kernel]:
    """Kernels that differ only in where they stand become one with their counts added up."""
    found: dict[tuple[object, ...], Kernel] = {}
    for kernel in kernels:
        vectors = tuple(vector.tobytes() for vector in (kernel.flops, kernel.moved, kernel.sent, kernel.chain))
        dims = (*sorted(kernel.dims.sizes.items()), kernel.dims.format, kernel.dims.limit)
        bound = (kernel.provider, kernel.call, kernel.sizes.key if kernel.sizes else ())
        key = (
            kernel.op,
            kernel.label,
            kernel.kind,
            kernel.dtype,
            dims,
            kernel.launches,
            kernel.segment,
            vectors,
            bound,
        )
        found[key] = replace(found[key], count=found[key].count + kernel.count) if key in found else kernel
    yield from found.values()
