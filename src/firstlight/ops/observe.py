"""The one hook of a bound call: an observer stands in its place while attached, and costs nothing when it isn't.

The cost walk, `verify`, `profile`, `calibrate` and the op log are observers; there is no second mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.ops.op import CallSite, Op, sites


@dataclass(frozen=True, slots=True)
class Bound:
    """A call site in one bucket: where it is, what it calls."""

    path: str
    label: str
    op: Op
    bucket: int
    run: Callable[..., Any]


Observer = Callable[[Bound, tuple[Any, ...], Mapping[str, Any]], Any]
"""Called in place of the bound function: `observer(bound, args, kwargs)`; its result is the call's result."""


@contextmanager
def observed(model: torch.nn.Module, observer: Observer, bucket: int | None = None) -> Iterator[None]:
    """Attach an observer to every call site of a model, in one bucket or in all; what was bound is restored at the end."""
    saved: list[tuple[CallSite, list[Callable[..., Any]]]] = []
    try:
        for path, site in sites(model):
            saved.append((site, list(site)))
            for index in range(len(site)) if bucket is None else (bucket,):
                site[index] = _watch(observer, Bound(path, site.label, site.op, index, site[index]))
        yield
    finally:
        for site, original in saved:
            site[:] = original


def _watch(observer: Observer, bound: Bound) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return observer(bound, args, kwargs)

    return call
