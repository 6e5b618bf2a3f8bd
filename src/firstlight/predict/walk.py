"""Walk a model's ops on the meta device, once, and keep their costs as functions of a step's shape.

Every cost is affine in a few sums over the step (`VARIABLES`): each weight is read once, and work grows with tokens, rows,
keys and pairs. So a call's coefficients follow exactly from a handful of walks that differ in one sum each. Ops may take
sizes from their arguments or from `Shape`: a walk sets both. Layers whose calls agree are walked once and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from firstlight.hardware import Hardware
from firstlight.hardware.timings import Timings
from firstlight.models.buckets import GPU_DEFAULTS
from firstlight.models.causal import CausalModel
from firstlight.models.walk import LAYER, alike_layers, meta_step, record, walk
from firstlight.ops.binding import Choice, bind, parse_overrides
from firstlight.ops.observe import Bound
from firstlight.ops.op import Op, Shape, sites
from firstlight.ops.sizes import Sizes, sizes_of
from firstlight.predict.dims import Dims, dims_of
from firstlight.predict.shape import Numbers
from firstlight.step import Bucket, StepBatch

VARIABLES = (
    "one", "decode_tokens", "decode_requests", "prefill_tokens", "prefill_requests", "logits", "keys", "pairs",
    "distinct", "longest",
)  # fmt: skip
BASE = {
    "decode_tokens": 6, "decode_requests": 3, "prefill_tokens": 512, "prefill_requests": 2, "logits": 5, "keys": 7,
    "pairs": 9, "distinct": 0.5, "longest": 256,
}  # fmt: skip
STEP = {"longest": 64, "prefill_tokens": 64, "decode_tokens": 3, "distinct": 0.25}
"""How far each variable is moved (1 unless given): whole chunks and whole rows."""


@dataclass(frozen=True, slots=True)
class WalkedCall:
    """One kind of call, and how often a step makes it.

    path: of its first occurrence. label: "decode", "prefill", or "" for all rows. inside: the composite ops that it is a part
    of, outermost first, each with the number of that occurrence. cost: coefficients by figure ("read", "flops:bfloat16", ...),
    each over VARIABLES. passed_on: bytes that only the next part of the composite reads, over VARIABLES: a fused kernel
    saves them twice. sizes: of the composites' calls in the order of `inside`, then of this one's.
    """

    op: str
    path: str
    label: str
    count: int
    inside: tuple[tuple[str, int], ...]
    dims: Dims
    cost: Mapping[str, Numbers]
    passed_on: Numbers
    sizes: tuple[Sizes, ...] = ()


@dataclass(frozen=True, slots=True)
class WalkedModel:
    """A model on one rank, ready to be priced for any step shape.

    choices: who computes what in the bucket that it was bound for, (path, op) -> provider name; None if it wasn't bound.
    workspace: scratch bytes of the largest call there.
    """

    calls: tuple[WalkedCall, ...]
    experts: int
    top_k: int
    layers: int
    sparse_layers: int
    choices: Mapping[tuple[str, str], str] | None = None
    workspace: int = 0


@dataclass(slots=True)
class _Seen:
    """A leaf call in one walk."""

    op: Op
    path: str
    label: str
    inside: tuple[tuple[str, int], ...]
    call: tuple[tuple[Any, ...], dict[str, Any]]
    around: tuple[tuple[Op, tuple[Any, ...], dict[str, Any]], ...] = ()
    passed_on: float = 0.0


def walk_model(
    model: CausalModel,
    *,
    page_size: int = GPU_DEFAULTS["page_size"],
    hardware: Hardware | None = None,
    bucket: Bucket | None = None,
    overrides: Sequence[str] = (),
    timings: Timings | None = None,
) -> WalkedModel:
    """Take the costs of a model that is on the meta device; with `bucket`, also bind it there for the described hardware.

    overrides, timings: for binding, as the engine takes them.
    """
    alike = alike_layers(model, _step(model, BASE, page_size))
    layers, counts = [group[0] for group in alike], [len(group) for group in alike]
    choices, workspace = None, 0
    with _only(model, layers):
        if bucket is not None and hardware is not None:
            choices, workspace = _bind(model, hardware, bucket, page_size, overrides, timings)
        calls = _costs(model, page_size, counts)
    text = model.config
    sparse = sum(text.sparse_layers) if text.num_experts else 0
    return WalkedModel(
        tuple(calls), text.num_experts, text.num_experts_per_tok, text.num_hidden_layers, sparse, choices, workspace
    )


@contextmanager
def _only(model: CausalModel, layers: Sequence[int]) -> Iterator[None]:
    """The model with only these layers, for as long as the block lasts."""
    whole = model.layers
    model.layers = torch.nn.ModuleList([whole[layer] for layer in layers])
    try:
        yield
    finally:
        model.layers = whole


def _bind(
    model: CausalModel,
    hardware: Hardware,
    bucket: Bucket,
    page_size: int,
    overrides: Sequence[str],
    timings: Timings | None,
) -> tuple[dict[tuple[str, str], str], int]:
    """Who computes each op of each call site in a bucket, and the scratch memory of the largest call."""
    bucket = replace(bucket, index=0)
    found = sites(model)
    chosen_by_name = parse_overrides(overrides, [site for _, site in found])
    for _, site in found:
        site.unbind()
    records = record(model, [bucket], hardware, page_size)
    binding = bind(records, 1, hardware, chosen_by_name, timings=timings)
    chosen: dict[tuple[str, str], str] = {}
    for path, site in found:
        for choice in site.choices:
            _note(chosen, path, choice)
        site.unbind()
    return chosen, binding.workspace


def _note(chosen: dict[tuple[str, str], str], path: str, choice: Choice) -> None:
    chosen[path, choice.op] = choice.provider
    for part in choice.parts:
        _note(chosen, path, part)


def _step(model: CausalModel, at: Mapping[str, float], page_size: int) -> StepBatch:
    """A mixed step on the meta device with these sums."""
    size = {name: int(value) for name, value in at.items()}
    tokens, requests = (size[f"decode_{unit}"] + size[f"prefill_{unit}"] for unit in ("tokens", "requests"))
    bucket = Bucket(0, tokens, requests, size["longest"], 4096, size["logits"])
    step = meta_step(model, bucket, decode_requests=size["decode_requests"], page_size=page_size)
    return replace(step, decode_tokens=size["decode_tokens"])


def _costs(model: CausalModel, page_size: int, counts: Sequence[int]) -> list[WalkedCall]:
    """Coefficients of every leaf call: the cost at a base point, and its change with each variable."""
    base = _leaves(model, BASE, page_size)
    cost = {seen_id: _figures(seen, BASE) for seen_id, seen in enumerate(base)}
    gradients: dict[str, list[tuple[dict[str, float], float]]] = {}
    for name in VARIABLES[1:]:
        distance = STEP.get(name, 1)
        moved = {**BASE, name: BASE[name] + distance}
        # Sums that no tensor's size depends on need no walk of their own.
        seen = base if name in ("keys", "pairs", "distinct") else _leaves(model, moved, page_size)
        if [leaf.op.name for leaf in seen] != [leaf.op.name for leaf in base]:
            raise AssertionError(
                f"the calls of {type(model).__name__} depend on {name}: a model must not branch on sizes"
            )
        gradients[name] = [
            (
                {
                    figure: (value - cost[i].get(figure, 0.0)) / distance
                    for figure, value in _figures(leaf, moved).items()
                },
                (leaf.passed_on - base[i].passed_on) / distance,
            )
            for i, leaf in enumerate(seen)
        ]
    calls = []
    for i, leaf in enumerate(base):
        rows = [gradients[name][i] for name in VARIABLES[1:]]
        coefficients = {
            figure: _with_constant(value, [row[0].get(figure, 0.0) for row in rows])
            for figure, value in cost[i].items()
        }
        passed_on = _with_constant(leaf.passed_on, [row[1] for row in rows])
        layer = LAYER.match(leaf.path)
        count = counts[int(layer[1])] if layer else 1
        args, kwargs = leaf.call
        dims = dims_of(leaf.op, args, kwargs)
        sizes = tuple(sizes_of(*call) for call in (*leaf.around, (leaf.op, args, kwargs)))
        calls.append(
            WalkedCall(leaf.op.name, leaf.path, leaf.label, count, leaf.inside, dims, coefficients, passed_on, sizes)
        )
    return calls


def _with_constant(value: float, slopes: Sequence[float]) -> Numbers:
    at_base = sum(slope * BASE[name] for name, slope in zip(VARIABLES[1:], slopes, strict=True))
    constant = value - at_base
    return np.array([constant if abs(constant) > 1e-9 * abs(value) else 0.0, *slopes])


def _figures(seen: _Seen, at: Mapping[str, float]) -> dict[str, float]:
    """The cost of a leaf call as plain figures, at a point."""
    args, kwargs = seen.call
    parts = ("decode", "prefill") if not seen.label else (seen.label,)
    tokens = sum(at[f"{part}_tokens"] for part in parts)
    requests = sum(at[f"{part}_requests"] for part in parts)
    cost = seen.op.cost(Shape(tokens, requests, at["keys"], at["pairs"], at["distinct"]), *args, **kwargs)
    figures = {f"flops:{dtype}": float(count) for dtype, count in cost.flops.items()}
    for name in ("read", "written", "sent", "messages", "chain", "launches"):
        figures[name] = float(getattr(cost, name))
    return figures


def _leaves(model: CausalModel, at: Mapping[str, float], page_size: int) -> list[_Seen]:
    """Every primitive call of a walk, composites taken apart."""
    leaves: list[_Seen] = []
    number = 0

    def call(
        op: Op,
        path: str,
        label: str,
        inside: tuple[tuple[str, int], ...],
        around: tuple[tuple[Op, tuple[Any, ...], dict[str, Any]], ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        nonlocal number
        if not op.parts:
            leaves.append(_Seen(op, path, label, inside, (args, kwargs), around))
            return op.abstract(*args, **kwargs)
        number += 1
        within, beyond = (*inside, (op.name, number)), (*around, (op, args, kwargs))
        results: list[tuple[_Seen, Any]] = []

        def part(inner: Op, *part_args: Any, **part_kwargs: Any) -> Any:
            first = len(leaves)
            result = call(inner, path, label, within, beyond, part_args, part_kwargs)
            if len(leaves) == first + 1:
                results.append((leaves[first], result))
            return result

        returned = op.compose({name: partial(part, inner) for name, inner in op.parts.items()})(*args, **kwargs)
        kept = {id(tensor) for tensor in _tensors(returned)}
        for leaf, result in results:
            leaf.passed_on = float(sum(tensor.nbytes for tensor in _tensors(result) if id(tensor) not in kept))
        return op.abstract(*args, **kwargs)

    def observe(bound: Bound, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        label = bound.label if bound.label in ("decode", "prefill") else ""
        return call(bound.op, bound.path, label, (), (), args, dict(kwargs))

    walk(model, _step(model, at, page_size), observe)
    return leaves


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple) else []
