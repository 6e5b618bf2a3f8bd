"""Choose, once and at load, a provider for every call site and bucket, and one layout for every weight.

`bind` is a pure function of what was recorded on the meta device: specs, bucket, a description of the hardware and a table
of timings. It never looks at a live device or at data, so a prediction for another GPU binds as a run there would. Among the
providers that can serve a call, the one that was measured fastest wins; where nothing was measured, the highest rank. A
provider that is refused says why; nothing falls back in silence. An override that can't be met is an error with the reason.
Between those who were chosen, tensors go packed where that saves a kernel (`ops.handover`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from firstlight.errors import InputError
from firstlight.hardware import Hardware
from firstlight.hardware.timings import Estimate, Timings, compared
from firstlight.ops.handover import hand_over
from firstlight.ops.op import REFERENCE, REGISTRY, Call, CallSite, Op, Provider
from firstlight.ops.sizes import sizes_of
from firstlight.quant import LAYOUTS, PLAIN, Packed, Weight, format_of

PARTS = "parts"
"""The name under which a composite's own body, over the providers chosen for its parts, is chosen or overridden."""


class BindingError(InputError):
    """An override that names nothing, or that can't be met; the message says why and what is legal."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A call of a site, as made on the meta device."""

    path: str
    site: CallSite
    call: Call


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes an op at one site in one bucket, and why nobody else does.

    seconds: of its calls there, as measured, if that is why it was chosen; 0.0: it was chosen by rank, or was asked for.
    runner_up: (provider, seconds) of the next best then, if another one could have served.
    handover: in which form it gives or reads a tensor whose form can be chosen, for people; "" if that is plain for good.
    """

    op: str
    provider: str
    refused: tuple[tuple[str, str], ...] = ()
    parts: tuple[Choice, ...] = ()
    workspace: int = 0
    seconds: float = 0.0
    runner_up: tuple[str, float] | None = None
    handover: str = ""

    @property
    def is_called(self) -> bool:
        """Whether the op is called in the bucket at all."""
        return all(name != "*" for name, _ in self.refused)

    def with_parts(self, depth: int = 0) -> Iterator[tuple[int, Choice]]:
        """This choice and those under it that are called, each with its depth."""
        if self.is_called:
            yield depth, self
        for part in self.parts:
            yield from part.with_parts(depth + 1)


@dataclass(slots=True, eq=False)
class Use:
    """An op at a site (or as a part of a composite at a site) in one bucket, with every call that it makes there.

    between: bytes that a composite's parts pass on to each other in its largest call, were they all kept to its end.
    """

    op: Op
    label: str
    calls: list[Call]
    parts: dict[str, Use] = field(default_factory=dict)
    between: int = 0

    def all(self) -> list[Use]:
        """This use and those under it."""
        return [self, *(inner for part in self.parts.values() for inner in part.all())]


@dataclass(frozen=True, slots=True)
class Binding:
    """The result: a layout by weight (key: id of the meta tensor or Packed), and the scratch memory of the largest call."""

    layouts: Mapping[int, str]
    workspace: int


def parse_overrides(texts: Sequence[str], among: Sequence[CallSite] = ()) -> dict[str, str]:
    """`OP=PROVIDER` or `OP.LABEL=PROVIDER` -> mapping. Raises BindingError for ops or providers that don't exist.

    among: the sites of a model; where they call an op, itself or inside a composite, but none has the label, that is an
    error too. An op that none of them calls is none: an environment's overrides are for more than one model.
    """
    overrides = {}
    for text in texts:
        key, equals, provider = text.partition("=")
        name, dot, label = key.partition(".")
        if not equals or name not in REGISTRY:
            raise BindingError(
                f"--op {text}: expected OP=PROVIDER or OP.SITE=PROVIDER; ops: {', '.join(sorted(REGISTRY))}"
            )
        op = REGISTRY[name]
        legal = [REFERENCE, *([PARTS] if op.parts else []), *op.providers]
        if provider not in legal:
            raise BindingError(f"--op {text}: op {name} has no provider {provider!r}; it has {', '.join(legal)}")
        labels = {site.label for site in among if _calls(site.op, op)}
        if dot and labels and label not in labels:
            named = ", ".join(sorted(labels - {""})) or "none with a name"
            raise BindingError(f"--op {text}: op {name} has no site {label!r} in this model; it has {named}")
        overrides[key] = provider
    return overrides


def _calls(outer: Op, op: Op) -> bool:
    """Whether an op is another, or made of it."""
    return outer is op or any(_calls(part, op) for part in outer.parts.values())


def bind(
    records: Sequence[Record],
    buckets: int,
    hardware: Hardware,
    overrides: Mapping[str, str] | None = None,
    invariant: bool = False,
    timings: Timings | None = None,
) -> Binding:
    """Fill every recorded site with one callable per bucket.

    buckets: how many; a site that a bucket never calls gets the reference there. invariant: one provider for all buckets.
    timings: measured on this hardware; without them ranks decide. Raises BindingError.
    """
    binder = Binder(hardware, overrides or {}, timings)
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
    for key, by_tree in trees.items():
        site = named[key]
        site.unbind(buckets)
        site.choices = [Choice(site.op.name, REFERENCE, (("*", "not called in this bucket"),))] * buckets
        for bucket, tree in by_tree.items():
            site[bucket], site.choices[bucket] = binder.choose(tree)
    hand_over(binder, [(named[key], by_tree) for key, by_tree in trees.items()])
    workspace = max((choice.workspace for site in named.values() for choice in site.choices), default=0)
    return Binding(binder.layouts, workspace)


def weights_of(op: Op, call: Call, names: Sequence[str]) -> dict[str, Weight]:
    """The weights that a call passes for the named arguments; absent (None) ones are left out."""
    bound = op.signature.bind_partial(*call.args, **call.kwargs).arguments
    return {name: bound[name] for name in names if isinstance(bound.get(name), torch.Tensor | Packed)}


@dataclass(frozen=True, slots=True)
class _Pick:
    """Who serves a use ("": its parts, or the reference), and why others don't; see `Choice`."""

    name: str
    refused: list[tuple[str, str]]
    seconds: float = 0.0
    runner_up: tuple[str, float] | None = None


class Binder:
    """Makes the choices, in the steps that `bind` takes."""

    def __init__(self, hardware: Hardware, overrides: Mapping[str, str], timings: Timings | None) -> None:
        self.hardware, self.overrides, self.timings = hardware, overrides, timings
        self.layouts: dict[int, str] = {}
        self.open: set[int] = set()  # weights whose layout isn't chosen yet: they can still have any

    def tree(self, op: Op, label: str, calls: list[Call]) -> Use:
        """The uses under an op, found by running composite bodies over recorders on the meta device."""
        use = Use(op, label, calls)
        if not op.parts:
            return use
        inner: dict[str, list[Call]] = {}
        passed = 0

        def record(name: str, part: Op, bucket: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            inner.setdefault(name, []).append(Call(args, kwargs, bucket, self.hardware))
            result = part.abstract(*args, **kwargs)
            passed += _result_bytes(result)
            return result

        for call in calls:
            passed = 0
            recorders = {name: partial(record, name, part, call.bucket) for name, part in op.parts.items()}
            result = op.compose(recorders)(*call.args, **call.kwargs)
            use.between = max(use.between, passed - _result_bytes(result))
        use.parts = {name: self.tree(op.parts[name], label, part_calls) for name, part_calls in inner.items()}
        return use

    def override(self, use: Use) -> str | None:
        """The provider asked for by name, if any. A composite round an overridden op is made of its parts."""
        for key in (f"{use.op.name}.{use.label}", use.op.name):
            if key in self.overrides:
                return self.overrides[key]
        return PARTS if any(self.override(part) for part in use.parts.values()) else None

    def refusal(self, use: Use, provider: Provider, layouts: Mapping[int, str] | None = None) -> str | None:
        """Why a provider can't serve a use (with the layouts chosen so far), or None."""
        layouts = self.layouts if layouts is None else layouts
        for call in use.calls:
            if "emit" in call.kwargs and not provider.emits:
                return f"{provider.name} gives plain results only"
            if reason := provider.when(call):
                return reason
            for name, weight in weights_of(use.op, call, self.layout_arguments(use.op)).items():
                if id(weight) in self.open:
                    continue
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
        self.open = set(weights)
        for key, weight in weights.items():
            self.open.discard(key)
            candidates = {PLAIN} | {
                layout
                for use in touching[key].values()
                for provider in use.op.providers.values()
                for layout in provider.layout.values()
                if layout != PLAIN and LAYOUTS[layout].accepts(format_of(weight), tuple(weight.shape)) is None
            }
            best = self._best_layout(
                list(touching[key].values()), key, sorted(candidates, key=lambda name: name != PLAIN)
            )
            if best != PLAIN:
                self.layouts[key] = best

    def _best_layout(self, uses: list[Use], key: int, candidates: list[str]) -> str:
        """The layout of the least time, if all uses were measured under each of them; else of the highest ranks."""
        if len(candidates) == 1:
            return candidates[0]
        times: dict[str, float] = {}
        ranks: dict[str, float] = {}
        for name in candidates:
            layouts = {**self.layouts, key: name}
            measured, ranks[name] = [], 0.0
            for use in uses:
                asked = self.override(use)
                willing = [
                    provider
                    for provider in use.op.providers.values()
                    if (provider.name == asked if asked else not provider.lossy)
                    and self.refusal(use, provider, layouts) is None
                ]
                ranks[name] += max((provider.rank for provider in willing), default=0)
                measured.append(
                    min(self.seconds(use, [provider.name for provider in willing])[0].values(), default=0.0)
                )
            if all(measured):
                times[name] = sum(measured)
        if len(times) == len(candidates):
            return min(candidates, key=lambda name: times[name])
        return max(candidates, key=lambda name: ranks[name])

    def seconds(self, use: Use, names: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
        """What all calls of a use take, by provider, as far as it was measured; and who failed when it was, with the reason.

        Empty if no provider of `names` was measured at every call.
        """
        if self.timings is None:
            return {}, {}
        label = use.label if use.label in ("decode", "prefill") else ""
        calls: dict[tuple[object, ...], Mapping[str, Estimate]] = {}
        for call in use.calls:
            sizes = sizes_of(use.op, call.args, call.kwargs)
            if sizes.key not in calls:
                found = self.timings.estimates(
                    use.op.name, label, format=sizes.format, dtype=sizes.dtype, fixed=sizes.fixed, step=sizes.step
                )
                calls[sizes.key] = {name: found[name] for name in names if name in found}
        failed = {name: known.refused for found in calls.values() for name, known in found.items() if known.refused}
        total: dict[str, float] = {}
        for i, found in enumerate(calls.values()):
            times = compared({name: known for name, known in found.items() if name not in failed})
            total = times if i == 0 else {name: total[name] + times[name] for name in total if name in times}
        return total, failed

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
        pick = self._pick(use, willing, asked)
        refused += pick.refused
        if pick.name not in ("", PARTS):
            best = use.op.providers[pick.name]
            scratch = max((best.workspace(call) for call in use.calls), default=0) if best.workspace else 0
            choice = Choice(use.op.name, best.name, tuple(refused), (), scratch, pick.seconds, pick.runner_up)
            return best.run, choice
        if not use.op.parts or asked == REFERENCE:
            return use.op.reference, Choice(use.op.name, REFERENCE, tuple(refused))
        chosen = {name: self.choose(part) for name, part in use.parts.items()}
        callables = {name: part.reference for name, part in use.op.parts.items()}
        callables.update({name: run for name, (run, _) in chosen.items()})
        parts = tuple(choice for _, choice in chosen.values())
        scratch = use.between + max((choice.workspace for choice in parts), default=0)
        choice = Choice(use.op.name, PARTS, tuple(refused), parts, scratch, pick.seconds, pick.runner_up)
        return use.op.compose(callables), choice

    def _pick(self, use: Use, willing: Sequence[Provider], asked: str | None) -> _Pick:
        """The fastest of the willing, or the highest-ranked; a composite's own body is a candidate where it was measured."""
        candidates = [provider.name for provider in willing]
        if use.op.parts and asked is None:
            candidates.append(PARTS)
        times, failed = ({}, {}) if asked else self.seconds(use, candidates)
        refused = [(name, f"failed when it was measured: {reason}") for name, reason in failed.items()]
        willing = [provider for provider in willing if provider.name not in failed]
        if times and not (set(times) == {PARTS} and willing):  # parts alone can't be compared with what wasn't measured
            best, *others = sorted(times, key=lambda name: times[name])
            took = f"{best} takes {microseconds(times[best])} us"
            refused += [(name, f"{microseconds(times[name])} us measured, {took}") for name in others]
            refused += [(p.name, f"not measured, {took}") for p in willing if p.name not in times]
            return _Pick(best, refused, times[best], (others[0], times[others[0]]) if others else None)
        if willing:
            best = max(willing, key=lambda provider: provider.rank).name
            return _Pick(best, [*refused, *((p.name, f"{best} ranks higher") for p in willing if p.name != best)])
        return _Pick("", refused)


def _result_bytes(result: Any) -> int:
    """Bytes of an abstract result."""
    items = result if isinstance(result, tuple) else (result,)
    return sum(item.nbytes for item in items if isinstance(item, torch.Tensor | Packed))


def microseconds(seconds: float) -> str:
    """A time for people: three digits at least, and no more decimals than that takes."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"
