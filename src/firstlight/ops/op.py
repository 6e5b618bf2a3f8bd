"""What an op is: a contract, a plain body, an abstract, a cost, and any number of providers.

An *op* says what is computed. Its `body` is plain torch and is the reference; a *provider* computes the same thing faster
on some hardware. A module holds a `CallSite` for each place where it calls an op, and calls it as

    y = self.norm[step.bucket.index](x, self.weight, eps=self.eps)

`ops.binding.bind` puts one callable per bucket into the site, once, at load; so a bound call is a list index. An observer
(cost walk, verify, profile) wraps the entries while it is attached, and costs nothing when it isn't.

A *composite* op's body takes the ops that it is made of as its first argument, `parts`, whose attributes are callables: it
is the reference when they are the references, and the fallback for hardware where nobody provides the whole.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch

from firstlight.hardware import Hardware
from firstlight.quant import Emission, Format

REFERENCE = "reference"
PRODUCTS = ("linear", "experts")
"""Ops that take most of a step, whichever step: where the reference computes them on a GPU, everything waits for it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call has to do, or does. Numbers may be numpy arrays (one entry a step shape).

    flops: operations by the dtype of the multiply ("bfloat16": ...); read, written: bytes of device memory; sent: bytes
    to other ranks; messages: collectives; chain: serial steps that no parallelism shortens; launches: kernels started.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    read: float = 0
    written: float = 0
    sent: float = 0
    messages: float = 0
    chain: float = 0
    launches: float = 1

    def __add__(self, other: Cost) -> Cost:
        flops = dict(self.flops)
        for dtype, count in other.flops.items():
            flops[dtype] = flops.get(dtype, 0) + count
        return Cost(
            flops,
            self.read + other.read,
            self.written + other.written,
            self.sent + other.sent,
            self.messages + other.messages,
            self.chain + other.chain,
            self.launches + other.launches,
        )


NO_COST = Cost(launches=0)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sums over a step that costs need; exact in a prediction, an upper bound in a run. Entries may be numpy arrays.

    tokens: new tokens; requests: rows; keys_read: sum over requests of the context that attention reads (tokens);
    query_keys: sum over new tokens of the keys each attends to; distinct_experts: expected share of a layer's experts
    that at least one token is routed to (0..1).
    """

    tokens: float
    requests: float
    keys_read: float
    query_keys: float
    distinct_experts: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call to be bound: what a provider's `when` sees. `args` and `kwargs` hold meta tensors in place of tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bucket: Any  # step.Bucket; ops know no steps
    hardware: Hardware

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor argument: what flows."""
        return next(a.dtype for a in self.args if isinstance(a, torch.Tensor))


def always(call: Call) -> str | None:
    """The `when` of a provider that can serve every call."""
    return None


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute an op.

    run: the function, with the op's signature. when: None if it can serve a call, otherwise why not, for people.
    layout: the weight layout that it reads, by argument name (see `quant.layouts`); weights that aren't named are plain.
    lossy: what it gives up, or "" (lossy providers are off until an override asks for them).
    rank: preference among the willing where no calibration table decides; higher wins, the reference has 0.
    workspace: bytes of scratch memory for a call. cost: the work it does, if that isn't the op's own cost.
    emits: whether it can give its result packed (`emit=`, of type `quant.Emission`); `when` then judges that as well.
    wants: the format to which it quantises a plain first argument, and in which it would rather get it; see `Handover`.
    """

    op: Op
    name: str
    run: Callable[..., Any]
    when: Callable[[Call], str | None] = always
    layout: Mapping[str, str] = field(default_factory=dict)
    lossy: str = ""
    rank: int = 1
    workspace: Callable[[Call], int] | None = None
    cost: Callable[..., Cost] | None = None
    emits: bool = False
    wants: Format | None = None


class Op:
    """An op; `body.__doc__` is its contract.

    abstract: same signature as the body, on meta tensors: returns meta tensors, computes nothing.
    cost: `cost(shape, *args, **kwargs) -> Cost` on meta tensors: the floor. None for a composite: the sum of its parts.
    parts: of a composite, the ops that it is made of, by the names that its body calls them by (their own, if a sequence):
    each name is a place that gets a provider of its own.
    mutates: argument written in place -> the argument that selects its rows ("" if it is written whole).
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., Any],
        *,
        abstract: Callable[..., Any],
        cost: Callable[..., Cost] | None = None,
        parts: Sequence[Op] | Mapping[str, Op] = (),
        mutates: Mapping[str, str] | None = None,
    ) -> None:
        if (cost is None) != bool(parts):
            raise ValueError(f"op {name}: a primitive has a cost and no parts, a composite has parts and no cost")
        self.name = name
        self.body = body
        self.abstract = abstract
        self.own_cost = cost
        self.parts = dict(parts) if isinstance(parts, Mapping) else {part.name: part for part in parts}
        self.mutates = dict(mutates or {})
        self.providers: dict[str, Provider] = {}
        self.reference: Callable[..., Any] = (
            self.compose({name: part.reference for name, part in self.parts.items()}) if parts else body
        )
        self.__doc__ = body.__doc__
        if name in REGISTRY:
            raise ValueError(f"two ops are named {name}")
        REGISTRY[name] = self

    @cached_property
    def signature(self) -> inspect.Signature:
        """What a call passes: the body's parameters, without a composite's `parts`."""
        signature = inspect.signature(self.body)
        parameters = list(signature.parameters.values())
        return signature.replace(parameters=parameters[1:] if self.parts else parameters)

    def compose(self, parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        """The body of a composite over the given callables, by the names of its parts."""
        return partial(self.body, SimpleNamespace(**parts))

    def provide(self, name: str, run: Callable[..., Any], **properties: Any) -> Provider:
        """Register a provider; see `Provider` for the properties."""
        if name in self.providers or name == REFERENCE:
            raise ValueError(f"op {self.name} has a provider {name} already")
        self.providers[name] = provider = Provider(self, name, run, **properties)
        return provider

    def cost(self, shape: Shape, *args: Any, **kwargs: Any) -> Cost:
        """The floor of a call on meta tensors: what any implementation has to move and compute."""
        if self.own_cost is not None:
            return self.own_cost(shape, *args, **kwargs)
        total = NO_COST

        def walk(part: Op, *part_args: Any, **part_kwargs: Any) -> Any:
            nonlocal total
            total = total + part.cost(shape, *part_args, **part_kwargs)
            return part.abstract(*part_args, **part_kwargs)

        self.compose({name: partial(walk, part) for name, part in self.parts.items()})(*args, **kwargs)
        return total

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The reference. Serving goes through a `CallSite`."""
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Op({self.name})"


REGISTRY: dict[str, Op] = {}
"""Every op by name."""


class Handover(list[Mapping[str, Emission]]):
    """A tensor that one module's op makes and others read: in which form it goes from the one to the others.

    One entry per bucket: what the op that makes it is called with in addition, `**handover[bucket]`: nothing (the tensor is plain),
    or `emit=`. Binding decides it (`ops.handover`). readers: the call sites that read it, which must be all there are. A site
    whose weight is packed reads the packed form, any other the plain one.
    """

    def __init__(self, readers: Sequence[CallSite] = ()) -> None:
        super().__init__([{}])
        self.readers = tuple(readers)


class CallSite(list[Callable[..., Any]]):
    """A place in a module that calls an op: a list with one bound callable per bucket. Unbound, it is the reference.

    label: tells apart the sites of one op in a module ("decode", "prefill"); overrides may name it.
    gives: where its result goes, if the form of that can be chosen.
    """

    __slots__ = ("choices", "gives", "label", "op")

    def __init__(self, op: Op, label: str = "", gives: Handover | None = None) -> None:
        super().__init__([op.reference])
        self.op = op
        self.label = label
        self.gives = gives
        self.choices: list[Any] = []  # binding.Choice, one per bucket

    def unbind(self, buckets: int = 1) -> None:
        """The reference in every bucket, and plain results."""
        self[:] = [self.op.reference] * buckets
        self.choices = []
        if self.gives is not None:
            self.gives[:] = [{}] * buckets


def across_layers(path: str) -> str:
    """A site's path that stands for those of all layers."""
    return re.sub(r"\.\d+\.", ".*.", path)


def sites(module: torch.nn.Module) -> list[tuple[str, CallSite]]:
    """Every call site under a module, with its path, in the modules' order; lists and dicts of sites included."""
    found = []
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for attribute, value in vars(child).items():
            if isinstance(value, CallSite):
                found.append((prefix + attribute, value))
            elif isinstance(value, dict):
                found += [
                    (f"{prefix}{attribute}.{key}", item) for key, item in value.items() if isinstance(item, CallSite)
                ]
            elif isinstance(value, list):
                found += [
                    (f"{prefix}{attribute}.{i}", item) for i, item in enumerate(value) if isinstance(item, CallSite)
                ]
    return found
