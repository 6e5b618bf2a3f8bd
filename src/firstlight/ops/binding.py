"""Choose, once and at load, a provider for every call site and bucket, and one layout for every weight.

`bind` is a pure function of what was recorded on the meta device: specs, bucket and a description of the hardware. It never
looks at a live device or at data, so a prediction for another GPU binds as a run there would. A provider that is refused
says why; nothing falls back in silence. An override that can't be met is an error with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from firstlight.hardware import Hardware
from firstlight.ops.op import REFERENCE, REGISTRY, Call, CallSite, Op, Provider
from firstlight.quant import LAYOUTS, PLAIN, Packed, Weight, format_of

PARTS = "parts"
"""The name under which a composite's own body, over the providers chosen for its parts, is chosen or overridden."""


class BindingError(ValueError):
    """An override that names nothing, or that can't be met; the message says why and what is legal."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A call of a site, as made on the meta device."""

    path: str
    site: CallSite
    call: Call


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes an op at one site in one bucket, and why nobody else does."""

    op: str
    provider: str
    refused: tuple[tuple[str, str], ...] = ()
    parts: tuple[Choice, ...] = ()
    workspace: int = 0


@dataclass(slots=True, eq=False)
class Use:
    """An op at a site (or as a part of a composite at a site) in one bucket, with every call that it makes there."""

    op: Op
    label: str
    calls: list[Call]
    parts: list[Use] = field(default_factory=list)

    def all(self) -> list[Use]:
        """This use and those under it."""
        return [self, *(inner for part in self.parts for inner in part.all())]


@dataclass(frozen=True, slots=True)
class Binding:
    """The result: a layout by weight (key: id of the meta tensor or Packed), and the scratch memory of the largest call."""

    layouts: Mapping[int, str]
    workspace: int


def parse_overrides(texts: Sequence[str]) -> dict[str, str]:
    """`OP=PROVIDER` or `OP.LABEL=PROVIDER` -> mapping. Raises BindingError for ops or providers that don't exist."""
    overrides = {}
    for text in texts:
        key, equals, provider = text.partition("=")
        name = key.partition(".")[0]
        if not equals or name not in REGISTRY:
            raise BindingError(
                f"--op {text}: expected OP=PROVIDER or OP.SITE=PROVIDER; ops: {', '.join(sorted(REGISTRY))}"
            )
        op = REGISTRY[name]
        legal = [REFERENCE, *([PARTS] if op.parts else []), *op.providers]
        if provider not in legal:
            raise BindingError(f"--op {text}: op {name} has no provider {provider!r}; it has {', '.join(legal)}")
        overrides[key] = provider
    return overrides


def bind(
    records: Sequence[Record],
    buckets: int,
    hardware: Hardware,
    overrides: Mapping[str, str] | None = None,
    invariant: bool = False,
) -> Binding:
    """Fill every recorded site with one callable per bucket.

    buckets: how many; a site that a bucket never calls gets the reference there. invariant: one provider for all buckets.
    Raises BindingError.
    """
    binder = _Binder(hardware, overrides or {})
    uses: dict[int, dict[int, list[Call]]] = {}
    named: dict[int, CallSite] = {}
    for record in records:
        named[id(record.site)] = record.site
        call = replace(record.call, hardware=hardware)
        uses.setdefault(id(record.site), {}).setdefault(call.bucket.index, []).append(call)
    trees: dict[int, dict[int, Use]] = {}
    for key, by_bucket in uses.items():
        site = named[key]
        if invariant:
            merged = [call for calls in by_bucket.values() for call in calls]
            tree = binder.tree(site.op, site.label, merged)
            trees[key] = dict.fromkeys(by_bucket, tree)
        else:
            trees[key] = {bucket: binder.tree(site.op, site.label, calls) for bucket, calls in by_bucket.items()}
    binder.choose_layouts([use for by_bucket in trees.values() for tree in by_bucket.values() for use in tree.all()])
    workspace = 0
    for key, by_tree in trees.items():
        site = named[key]
        site[:] = [site.op.reference] * buckets
        site.choices = [Choice(site.op.name, REFERENCE, (("*", "not called in this bucket"),))] * buckets
        for bucket, tree in by_tree.items():
            site[bucket], site.choices[bucket] = binder.choose(tree)
            workspace = max(workspace, site.choices[bucket].workspace)
    return Binding(binder.layouts, workspace)


@cache
def _signature(op: Op) -> inspect.Signature:
    signature = inspect.signature(op.body)
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[1:] if op.parts else parameters)


def weights_of(op: Op, call: Call, names: Sequence[str]) -> dict[str, Weight]:
    """The weights that a call passes for the named arguments; absent (None) ones are left out."""
    bound = _signature(op).bind_partial(*call.args, **call.kwargs).arguments
    return {name: bound[name] for name in names if isinstance(bound.get(name), torch.Tensor | Packed)}


class _Binder:
    def __init__(self, hardware: Hardware, overrides: Mapping[str, str]) -> None:
        self.hardware, self.overrides = hardware, overrides
        self.layouts: dict[int, str] = {}

    def tree(self, op: Op, label: str, calls: list[Call]) -> Use:
        """The uses under an op, found by running composite bodies over recorders on the meta device."""
        use = Use(op, label, calls)
        if not op.parts:
            return use
        inner: dict[str, list[Call]] = {}

        def record(part: Op, bucket: Any, *args: Any, **kwargs: Any) -> Any:
            inner.setdefault(part.name, []).append(Call(args, kwargs, bucket, self.hardware))
            return part.abstract(*args, **kwargs)

        for call in calls:
            recorders = {name: partial(record, part, call.bucket) for name, part in op.parts.items()}
            op.compose(recorders)(*call.args, **call.kwargs)
        use.parts = [self.tree(op.parts[name], label, part_calls) for name, part_calls in inner.items()]
        return use

    def override(self, use: Use) -> str | None:
        """The provider asked for by name, if any. A composite round an overridden op is made of its parts."""
        for key in (f"{use.op.name}.{use.label}", use.op.name):
            if key in self.overrides:
                return self.overrides[key]
        return PARTS if any(self.override(part) for part in use.parts) else None

    def refusal(self, use: Use, provider: Provider, layouts: Mapping[int, str] | None = None) -> str | None:
        """Why a provider can't serve a use (with the layouts chosen so far), or None."""
        layouts = self.layouts if layouts is None else layouts
        for call in use.calls:
            if reason := provider.when(call):
                return reason
            for name, weight in weights_of(use.op, call, self.layout_arguments(use.op)).items():
                wanted, chosen = provider.layout.get(name, PLAIN), layouts.get(id(weight), PLAIN)
                if wanted != chosen:
                    return f"reads {name} as {wanted}, but it is laid out as {chosen}"
        return None

    @staticmethod
    def layout_arguments(op: Op) -> list[str]:
        """Arguments for which some provider of the op wants a layout of its own."""
        return sorted({name for provider in op.providers.values() for name in provider.layout})

    def choose_layouts(self, uses: list[Use]) -> None:
        """For each weight the layout under which its uses, in all buckets together, get the best providers."""
        touching: dict[int, dict[int, Use]] = {}
        weights: dict[int, Weight] = {}
        for use in uses:
            names = self.layout_arguments(use.op)
            for call in use.calls:
                for weight in weights_of(use.op, call, names).values():
                    weights[id(weight)] = weight
                    touching.setdefault(id(weight), {})[id(use)] = use
        for key, weight in weights.items():
            candidates = {PLAIN} | {
                layout
                for use in touching[key].values()
                for provider in use.op.providers.values()
                for layout in provider.layout.values()
                if layout != PLAIN and LAYOUTS[layout].accepts(format_of(weight), tuple(weight.shape)) is None
            }
            best = max(
                sorted(candidates, key=lambda name: name != PLAIN),
                key=lambda name: self._score(list(touching[key].values()), key, name),
            )
            if best != PLAIN:
                self.layouts[key] = best

    def _score(self, uses: list[Use], key: int, layout: str) -> float:
        layouts = {**self.layouts, key: layout}
        total = 0.0
        for use in uses:
            asked = self.override(use)
            willing = [
                provider.rank
                for provider in use.op.providers.values()
                if (provider.name == asked if asked else not provider.lossy)
                and self.refusal(use, provider, layouts) is None
            ]
            total += max(willing, default=0)
        return total

    def choose(self, use: Use) -> tuple[Any, Choice]:
        """The callable for a use, and the account of the choice. Raises BindingError for an override that can't be met."""
        asked = self.override(use)
        refused: list[tuple[str, str]] = []
        willing: list[Provider] = []
        for provider in use.op.providers.values():
            reason = self.refusal(use, provider)
            if reason is None and provider.lossy and provider.name != asked:
                reason = f"lossy ({provider.lossy}); ask for it with --op {use.op.name}={provider.name}"
            if reason is None:
                willing.append(provider)
            else:
                refused.append((provider.name, reason))
        if asked not in (None, REFERENCE, PARTS):
            reasons = dict(refused)
            if asked in reasons:
                raise BindingError(f"--op {use.op.name}={asked}: {reasons[asked]}")
            willing = [provider for provider in willing if provider.name == asked]
        if asked in (REFERENCE, PARTS):
            willing = []
        if willing:
            best = max(willing, key=lambda provider: provider.rank)
            refused += [(other.name, f"{best.name} ranks higher") for other in willing if other is not best]
            scratch = max((best.workspace(call) for call in use.calls), default=0) if best.workspace else 0
            return best.run, Choice(use.op.name, best.name, tuple(refused), workspace=scratch)
        if not use.op.parts or asked == REFERENCE:
            return use.op.reference, Choice(use.op.name, REFERENCE, tuple(refused))
        chosen = {part.op.name: self.choose(part) for part in use.parts}
        callables = {name: part.reference for name, part in use.op.parts.items()}
        callables.update({name: run for name, (run, _) in chosen.items()})
        parts = tuple(choice for _, choice in chosen.values())
        scratch = max((choice.workspace for choice in parts), default=0)
        return use.op.compose(callables), Choice(use.op.name, PARTS, tuple(refused), parts, scratch)
