"""Faults to be found: each changes one thing in a loaded model of ours, at one place, and says where it should be found.

A fault is declared by a decorated function that changes a module of the model it is given. `everywhere()` has all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from firstlight.models import CausalModel
from firstlight.nn.attention import Attention
from firstlight.nn.gated_delta_net import GatedDeltaNet
from firstlight.nn.mlp import MLP, MoE
from firstlight.ops.op import CallSite
from firstlight.quant import PLAIN, format_of, repack

Run = Callable[..., Any]
Place = Callable[[CausalModel], str | None]
"""Path of the module that a fault is put into, or None if a model has no such module."""

FAULTS: list[Fault] = []


@dataclass(frozen=True)
class Fault:
    """One way of being wrong.

    place: where it is. change: puts it there; given the model and the module. kind: how it shows; "module" unless it is
    in the wiring. wrong, right: phases in which the place must, or mustn't, be found wrong.
    """

    name: str
    place: Place
    change: Callable[[CausalModel, Any], None]
    kind: str = "module"
    wrong: frozenset[str] = frozenset()
    right: frozenset[str] = frozenset()


def fault(
    name: str, place: Place, *, kind: str = "module", wrong: set[str] | None = None, right: set[str] | None = None
) -> Callable[[Callable[[CausalModel, Any], None]], Callable[[CausalModel, Any], None]]:
    """Declares a fault."""

    def declare(change: Callable[[CausalModel, Any], None]) -> Callable[[CausalModel, Any], None]:
        FAULTS.append(Fault(name, place, change, kind, frozenset(wrong or ()), frozenset(right or ())))
        return change

    return declare


def everywhere() -> list[Fault]:
    """All faults."""
    if not FAULTS:
        for part in ("attention", "delta", "feed_forward", "model"):
            importlib.import_module(f"faults.{part}")
    return FAULTS


# ---------------------------------------------------------------------------------------------------------- places


def last_module(kind: type, when: Callable[[Any], bool] = lambda module: True) -> Place:
    """The last module of a type: that the layers before it are right must be seen."""

    def find(model: CausalModel) -> str | None:
        return next(
            (
                path
                for path, module in reversed(list(model.named_modules()))
                if isinstance(module, kind) and when(module)
            ),
            None,
        )

    return find


attention = last_module(Attention)
normed_attention = last_module(Attention, lambda module: module.q_norm is not None)
gated_attention = last_module(Attention, lambda module: module.gated)
grouped_attention = last_module(Attention, lambda module: 1 < module.kv_heads < module.heads)
delta = last_module(GatedDeltaNet)
grouped_delta = last_module(GatedDeltaNet, lambda module: 1 < module.key_heads < module.value_heads)
mlp = last_module(MLP)
moe = last_module(MoE)
shared_moe = last_module(MoE, lambda module: module.shared_gate_up_proj is not None)
gated_shared_moe = last_module(MoE, lambda module: module.shared_gate is not None)


def at(path: str, when: Callable[[CausalModel], bool] = lambda model: True) -> Place:
    """A module by its path; "{last}" and "{second}" in it stand for layers."""

    def find(model: CausalModel) -> str | None:
        return path.format(last=len(model.layers) - 1, second=1) if when(model) else None

    return find


# --------------------------------------------------------------------------------------------------------- changes


def wrap(site: CallSite, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper(run, *args, **kwargs)` in the place of every bound call."""
    site[:] = [partial(wrapper, run) for run in site]


def replace_parts(site: CallSite, **parts: Run) -> None:
    """Make a composite call of its references, but for the parts given by op name."""
    whole = site.op.compose({name: part.reference for name, part in site.op.parts.items()} | parts)
    site[:] = [whole] * len(site)


def part_of(site: CallSite, name: str) -> Run:
    """The reference of a composite's part."""
    return site.op.parts[name].reference


def change_weight(module: Any, attribute: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the values of a weight, whatever its layout; `change` gets a copy of them."""
    weight = getattr(module, attribute)
    layout = format_of(weight).layout
    plain = repack(weight, PLAIN)
    assert isinstance(plain, torch.Tensor)
    setattr(module, attribute, repack(change(plain.clone()), layout))


def transpose_square(weight: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """The largest square block at the beginning of a matrix (of its first `rows`), transposed."""
    side = min(rows or weight.shape[0], *weight.shape)
    weight[:side, :side] = weight[:side, :side].clone().t()
    return weight


def swap_rows(weight: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Two rows (or experts) exchanged."""
    weight[[first, second]] = weight[[second, first]]
    return weight


def wrap_forward(module: Any, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper(forward, step, *inputs)` in the place of a module's forward."""
    module.forward = partial(wrapper, module.forward)


def through_bfloat16(run: Run, *args: Any, **kwargs: Any) -> Any:
    """The result rounded to bfloat16 on the way."""
    out = run(*args, **kwargs)
    if isinstance(out, tuple):
        return (out[0].bfloat16().to(out[0].dtype), *out[1:])
    return out.bfloat16().to(out.dtype)
