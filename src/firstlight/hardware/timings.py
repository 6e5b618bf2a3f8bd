"""What a calibrated table says of a call: how long each provider takes, between the shapes that were measured. No torch.

A step sets four sizes of a call (`STEP_AXES`); all others must agree with the table's. Along tokens, the logarithm of a time is
linear in that of the size between two measured shapes; more than an octave outside of them the table says nothing. The others
make *situations*: what one number of tokens can be. Decode rows may have contexts of 1,024 or 32,768 tokens, 2,048 tokens of a
prefill may be one prompt or eight, with or without a prefix in the cache. Binding knows bounds and no more, so one choice must
serve all situations: providers are compared by the geometric mean over those that all of them were measured in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from firstlight.hardware.calibration import Measured, Table

STEP_AXES = ("tokens", "requests", "query", "context")
REACH = 1.0
"""Octaves beyond the measured shapes within which the outermost of them still speaks."""

Situation = tuple[float, ...]
Key = tuple[str, str, str, str, frozenset[tuple[str, float]]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a provider at a call. seconds: by situation, empty where nothing was measured near it. refused: why a
    call near it failed when the table was made, or ""."""

    seconds: Mapping[Situation, float]
    refused: str = ""


@dataclass(slots=True)
class _Curve:
    """A provider in one situation: log2 of tokens and of seconds, sorted by tokens; and where it failed, with the reason."""

    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: list[tuple[float, str]] = field(default_factory=list)


class Timings:
    """A calibrated table, ready to be asked."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._curves: dict[Key, dict[str, dict[Situation, _Curve]]] = {}
        self._asked: dict[tuple[object, ...], dict[str, Estimate]] = {}
        for group in table.groups:
            self._add(group)
        for providers in self._curves.values():
            for situations in providers.values():
                for curve in situations.values():
                    order = np.argsort(curve.tokens)
                    curve.tokens = [curve.tokens[i] for i in order]
                    curve.seconds = [curve.seconds[i] for i in order]

    def _add(self, group: Measured) -> None:
        points: list[tuple[tuple[float, ...], float, str]] = [(sizes, seconds, "") for sizes, seconds in group.rows]
        points += [(sizes, 0.0, reason) for sizes, reason in group.refused]
        for sizes, seconds, reason in points:
            given = dict(zip(group.axes, sizes, strict=True))
            step = {name: given.pop(name) for name in STEP_AXES if name in given}
            if "tokens" not in step:
                continue
            key = (group.op, group.label, group.format, group.dtype, frozenset(given.items()))
            situations = self._curves.setdefault(key, {}).setdefault(group.provider, {})
            curve = situations.setdefault(situation(step), _Curve())
            if reason:
                curve.failed.append((math.log2(step["tokens"]), reason))
            else:
                curve.tokens.append(math.log2(step["tokens"]))
                curve.seconds.append(math.log2(seconds))

    def estimates(
        self,
        op: str,
        label: str,
        *,
        format: str,
        dtype: str,
        fixed: Mapping[str, float],
        step: Mapping[str, float],
    ) -> Mapping[str, Estimate]:
        """By provider, for a call with these sizes; providers that were not measured for such calls are left out.

        format, dtype: as in the table. fixed: all sizes that a step doesn't set. step: those of STEP_AXES that the op has;
        `tokens` is what is interpolated along, `context` an upper bound, and of `query` only whether it is 1 counts.
        """
        sizes = frozenset((name, float(size)) for name, size in fixed.items())
        asked = (op, label, format, dtype, sizes, tuple(sorted(step.items())))
        if asked not in self._asked:
            found = self._curves.get((op, label, format, dtype, sizes), {})
            self._asked[asked] = {name: _estimate(situations, step) for name, situations in found.items()}
        return self._asked[asked]


def situation(step: Mapping[str, float]) -> Situation:
    """What a step's sizes say besides tokens: (0, context) of decode rows, (requests, tokens in the cache) of prompts."""
    query, context = step.get("query"), step.get("context")
    if query is None:
        return ()
    if query == 1:
        return (0.0,) if context is None else (0.0, context)
    requests = step.get("requests", 1.0)
    return (requests,) if context is None else (requests, context - query)


def _estimate(situations: Mapping[Situation, _Curve], step: Mapping[str, float]) -> Estimate:
    tokens = math.log2(max(step["tokens"], 1.0))
    seconds: dict[Situation, float] = {}
    for place, curve in _possible(situations, step).items():
        nearest = min((abs(tokens - x) for x in curve.tokens), default=math.inf)
        for x, reason in curve.failed:
            if abs(tokens - x) < nearest:
                return Estimate({}, reason)
        if curve.tokens and curve.tokens[0] - REACH <= tokens <= curve.tokens[-1] + REACH:
            seconds[place] = 2.0 ** float(np.interp(tokens, curve.tokens, curve.seconds))
    return Estimate(seconds)


def _possible(situations: Mapping[Situation, _Curve], step: Mapping[str, float]) -> Mapping[Situation, _Curve]:
    """Situations of the call's kind whose contexts are within its bound; those of all contexts if none is."""
    decode = step.get("query", 0) == 1
    kind = {place: curve for place, curve in situations.items() if not place or (place[0] == 0.0) == decode}
    bound = step.get("context", math.inf)
    return {place: curve for place, curve in kind.items() if len(place) < 2 or place[1] < bound + 1} or kind


def compared(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Seconds by provider, as the geometric mean over the situations in which all of those with times were measured.

    Empty if there is no such situation.
    """
    timed = {name: estimate.seconds for name, estimate in estimates.items() if estimate.seconds}
    if not timed:
        return {}
    common = set.intersection(*(set(seconds) for seconds in timed.values()))
    if not common:
        return {}
    return {
        name: math.exp(sum(math.log(seconds[place]) for place in common) / len(common))
        for name, seconds in timed.items()
    }
