"""Every abstract against its body, on example inputs: the same structure, shapes and dtypes, and no data touched."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from ops.examples import EXAMPLES

import firstlight.ops  # noqa: F401  (registers the ops)
from firstlight.ops.op import REGISTRY, Shape
from firstlight.parallel import Group
from firstlight.quant import Packed

STEP = Shape(tokens=5, requests=2, keys_read=16, query_keys=40, distinct_experts=0.5)
CASES = [(name, index) for name, makers in EXAMPLES.items() for index in range(len(makers))]


def to_meta(value: Any) -> Any:
    """The same value with meta tensors in place of tensors."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, Packed):
        return replace(value, parts={name: to_meta(part) for name, part in value.parts.items()})
    if is_dataclass(value) and not isinstance(value, (type, Group)):
        return replace(value, **{field.name: to_meta(getattr(value, field.name)) for field in fields(value)})
    return value


def described(value: Any) -> Any:
    """Shapes and dtypes of a result."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Packed):
        parts = {name: (*described(part), part.stride()) for name, part in value.parts.items()}
        return parts, value.format, value.shape, described(value.plain)
    if isinstance(value, tuple):
        return tuple(described(item) for item in value)
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a result or an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Packed):
        return [*value.parts.values(), *tensors(value.plain)]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in which a NaN equals itself."""
    return tensor.contiguous().flatten().view(torch.uint8)


def test_every_op_has_examples() -> None:
    assert sorted(EXAMPLES) == sorted(REGISTRY)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_abstract_describes_what_the_body_returns(name: str, index: int) -> None:
    args, kwargs = EXAMPLES[name][index]()
    op = REGISTRY[name]
    meta_args = tuple(to_meta(argument) for argument in args)
    meta_kwargs = {key: to_meta(argument) for key, argument in kwargs.items()}
    predicted = op.abstract(*meta_args, **meta_kwargs)
    assert described(predicted) == described(op.reference(*args, **kwargs))
    assert all(tensor.is_meta for tensor in tensors(predicted))
    cost = op.cost(STEP, *meta_args, **meta_kwargs)
    assert min(cost.read, cost.written, cost.sent) >= 0
    assert all(count > 0 for count in cost.flops.values())


@pytest.mark.parametrize(("name", "index"), CASES)
def test_only_declared_arguments_are_written(name: str, index: int) -> None:
    op = REGISTRY[name]
    before, after = EXAMPLES[name][index](), EXAMPLES[name][index]()
    op.reference(*after[0], **after[1])
    signature = inspect.signature(op.reference)
    named = [signature.bind(*args, **kwargs).arguments for args, kwargs in (before, after)]
    for argument in named[0]:
        if argument not in op.mutates:
            for was, now in zip(tensors(named[0][argument]), tensors(named[1][argument]), strict=True):
                assert torch.equal(stored(was), stored(now)), f"{name} writes {argument}"
