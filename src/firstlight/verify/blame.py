"""Inside the first wrong module: which of the ops that it calls differs from the op's own reference.

A module is wrong either because a provider computes an op wrongly, or because of what it does round its ops: weights,
arguments, order. An observer runs every call's reference beside the provider, on copies of what the call writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.models import CausalModel
from firstlight.ops.observe import Bound, Observer
from firstlight.ops.op import CallSite, Op, sites
from firstlight.verify.compare import row_errors


@dataclass(slots=True)
class OpError:
    """An op's call site, who computes it there, and its largest relative error against the op's reference."""

    site: str
    op: str
    provider: str
    error: float = 0.0


class Comparison:
    """Collects the errors of the ops that are called under a module's path."""

    def __init__(self, model: CausalModel, path: str) -> None:
        self.path = path
        self.sites: dict[str, CallSite] = dict(sites(model))
        self.errors: dict[str, OpError] = {}

    def observer(self) -> Observer:
        """To be attached with `observed`."""

        def observe(bound: Bound, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if not bound.path.startswith(f"{self.path}."):
                return bound.run(*args, **kwargs)
            copied = _copied(bound.op, args, kwargs)
            result = bound.run(*args, **kwargs)
            expected = bound.op.reference(*copied.args, **copied.kwargs)
            self._note(bound, _error(result, expected))
            return result

        return observe

    def _note(self, bound: Bound, error: float) -> None:
        site = self.sites[bound.path]
        provider = site.choices[bound.bucket].provider if site.choices else "reference"
        noted = self.errors.setdefault(bound.path, OpError(bound.path, bound.op.name, provider))
        if error > noted.error:
            noted.error, noted.provider = error, provider


def _copied(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """The arguments, with a copy of each tensor that the op writes."""
    bound = op.signature.bind(*args, **kwargs)
    for name in op.mutates:
        if isinstance(value := bound.arguments.get(name), torch.Tensor):
            bound.arguments[name] = value.clone()
    return bound


def _error(result: Any, expected: Any) -> float:
    """The largest row error over all tensors that are returned."""
    results = result if isinstance(result, tuple) else (result,)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    worst = 0.0
    for ours, reference in zip(results, wanted, strict=True):
        if isinstance(ours, torch.Tensor) and ours.is_floating_point() and len(ours):
            worst = max(worst, float(row_errors(*_comparable(ours.flatten(1), reference.flatten(1))).max()))
    return worst


def _comparable(ours: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With zeros where neither is finite: an op that is given NaN and gives NaN isn't to blame."""
    neither = ~ours.isfinite() & ~reference.isfinite()
    return ours.masked_fill(neither, 0), reference.masked_fill(neither, 0)
