"""In which form a tensor goes from the op that makes it to those that read it: what their providers agree on, bucket by bucket.

Providers are chosen first, as if every tensor were plain, so handing over packed ones changes no choice; and as those are what
the readers would have made of the plain ones, it changes no number either, but where the kernel that packs adds up in another
order than the plain one. An op that can't give what its readers want, or whose readers want different forms, gives plain results,
and they quantise them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from firstlight.ops.op import REFERENCE, Call, CallSite, Handover, sites
from firstlight.quant import Emission, Format, Packed
from firstlight.quant.activations import empty_packed

if TYPE_CHECKING:
    from firstlight.ops.binding import Binder, Choice, Use


def hand_over(binder: Binder, bound: Sequence[tuple[CallSite, Mapping[int, Use]]]) -> None:
    """Fill the handovers between sites that are bound, and note in their choices what came of it.

    bound: each site with what it calls, by bucket.
    """
    uses = {id(site): by_bucket for site, by_bucket in bound}
    givers: dict[int, tuple[Handover, list[CallSite]]] = {}
    for site, _ in bound:
        if site.gives is not None:
            givers.setdefault(id(site.gives), (site.gives, []))[1].append(site)
    for handover, makers in givers.values():
        for bucket in range(len(handover)):
            giving = [(site, uses[id(site)][bucket]) for site in makers if bucket in uses[id(site)]]
            reading = [(site, uses[id(site)][bucket]) for site in handover.readers if bucket in uses.get(id(site), {})]
            wanted, has_plain = _wanted(reading, bucket)
            if len(wanted) > 1:
                forms = " and ".join(sorted("plain values" if form is None else str(form) for form in wanted))
                for site, _ in giving:
                    note = f"gives plain values: its readers want {forms}"
                    site.choices[bucket] = replace(site.choices[bucket], handover=note)
            elif giving and (form := next(iter(wanted), None)) is not None:
                _settle(binder, handover, bucket, giving, reading, Emission(form, has_plain))


@contextmanager
def kept_plain(module: torch.nn.Module) -> Iterator[None]:
    """For as long as the block lasts, what a module's ops give goes plain: for those who look at it. Readers then quantise it."""
    handovers = {id(site.gives): site.gives for _, site in sites(module) if site.gives is not None}
    saved = [(handover, list(handover)) for handover in handovers.values()]
    for handover, entries in saved:
        handover[:] = [{}] * len(entries)
    try:
        yield
    finally:
        for handover, entries in saved:
            handover[:] = entries


def _wanted(reading: Sequence[tuple[CallSite, Use]], bucket: int) -> tuple[set[Format | None], bool]:
    """(what readers with packed weights want, None where it is plain values; whether there are other readers)."""
    wanted: set[Format | None] = set()
    has_plain = False
    for site, use in reading:
        provider = site.op.providers.get(site.choices[bucket].provider)
        for call in use.calls:
            if not _has_packed_weight(call):
                has_plain = True
            else:
                wanted.add(None if provider is None else provider.wants)
    return wanted, has_plain


def _has_packed_weight(call: Call) -> bool:
    return any(isinstance(argument, Packed) for argument in call.args[1:])


def _settle(
    binder: Binder,
    handover: Handover,
    bucket: int,
    giving: Sequence[tuple[CallSite, Use]],
    reading: Sequence[tuple[CallSite, Use]],
    emission: Emission,
) -> None:
    """Hand over packed, if all who give can."""
    asked = [
        (site, replace(use, calls=[replace(call, kwargs={**call.kwargs, "emit": emission}) for call in use.calls]))
        for site, use in giving
    ]
    unable = {id(site): _refusal(binder, use, site.choices[bucket]) for site, use in asked}
    if any(unable.values()):
        for site, _ in giving:
            reason = unable[id(site)] or "another op gives a part of the tensor, and can't"
            site.choices[bucket] = replace(
                site.choices[bucket], handover=f"gives plain values, and {emission.format} is wanted: {reason}"
            )
        return
    handover[bucket] = {"emit": emission}
    text = f"{emission.format}{' and plain values' if emission.plain else ''}"
    for site, use in asked:
        site.choices[bucket] = _noted(site.choices[bucket], use, f"gives {text}")
    for site, use in reading:
        if all(_has_packed_weight(call) for call in use.calls):
            calls = [_reading(call, emission.format) for call in use.calls]
            site.choices[bucket] = _noted(site.choices[bucket], replace(use, calls=calls), f"reads {emission.format}")


def _refusal(binder: Binder, asked: Use, choice: Choice) -> str | None:
    """Why those who were chosen for a use can't give what it asks for, or None."""
    provider = asked.op.providers.get(choice.provider)
    if provider is not None:
        return binder.refusal(asked, provider)
    if choice.provider == REFERENCE:
        return "the reference would quantise op by op"
    parts = zip(binder.tree(asked.op, asked.label, asked.calls).parts.values(), choice.parts, strict=True)
    emitting = [(part, chosen) for part, chosen in parts if any("emit" in call.kwargs for call in part.calls)]
    if not emitting:
        return "none of its parts can"
    return next((reason for part, chosen in emitting if (reason := _refusal(binder, part, chosen))), None)


def _reading(call: Call, form: Format) -> Call:
    """A reader's call as it is then made."""
    x = call.args[0]
    packed = empty_packed(x.shape, form, "meta")
    return replace(call, args=(packed, *call.args[1:]), kwargs={**call.kwargs, "dtype": x.dtype})


def _noted(choice: Choice, use: Use, handover: str) -> Choice:
    """A choice with the scratch memory of the calls that are made now."""
    provider = use.op.providers.get(choice.provider)
    if provider is None or provider.workspace is None:
        return replace(choice, handover=handover)
    return replace(choice, handover=handover, workspace=max(provider.workspace(call) for call in use.calls))
