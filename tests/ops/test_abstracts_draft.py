"""Every abstract against its body, on example inputs: the same structure, shapes and dtypes, and no data touched."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from ops.examples_a import EXAMPLES, Example

import firstlight.ops  # noqa: F401
from firstlight.ops.op import REGISTRY, Shape
from firstlight.parallel import Group
from firstlight.quant import Packed


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
    if isinstance(value, tuple):
        return tuple(described(item) for item in value)
    return value


CASES = [(name, index) for name, makers in EXAMPLES.items() for index in range(len(makers))]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_abstract_describes_what_the_body_returns(name: str, index: int) -> None:
    make: Example = EXAMPLES[name][index]
    args, kwargs = make()
    op = REGISTRY[name]
    meta_args = tuple(to_meta(argument) for argument in args)
    meta_kwargs = {key: to_meta(argument) for key, argument in kwargs.items()}
    predicted = op.abstract(*meta_args, **meta_kwargs)
    assert described(predicted) == described(op.reference(*args, **kwargs))
    for tensor in predicted if isinstance(predicted, tuple) else (predicted,):
        assert tensor is None or tensor.is_meta
    cost = op.cost(Shape(tokens=5, requests=2, keys_read=16, query_keys=40), *meta_args, **meta_kwargs)
    assert cost.read >= 0 and cost.written >= 0 and all(count > 0 for count in cost.flops.values())


@pytest.mark.parametrize(("name", "index"), CASES)
def test_only_declared_arguments_are_written(name: str, index: int) -> None:
    args, kwargs = EXAMPLES[name][index]()
    before, _ = EXAMPLES[name][index]()
    op = REGISTRY[name]
    op.reference(*args, **kwargs)
    names = list(op.body.__code__.co_varnames[bool(op.parts) :])
    for argument, was, value in zip(names, before, args, strict=False):
        if argument not in op.mutates and isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, was, rtol=0, atol=0, equal_nan=True)
