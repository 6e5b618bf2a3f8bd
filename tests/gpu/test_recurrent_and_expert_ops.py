"""Ops of recurrent layers and of experts on a GPU: every provider gives the CPU reference's answers, captured or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from ops.examples_b import EXAMPLES, normal
from torch import Tensor

from firstlight.hardware import H200
from firstlight.ops.experts import experts
from firstlight.ops.experts.torch_grouped import run as grouped
from firstlight.ops.op import REFERENCE, REGISTRY, Call
from firstlight.quant import Packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CAPTURABLE = set(REGISTRY) - {"experts", "moe"}
"""The reference of `experts` looks at data; its provider doesn't."""


def moved(value: Any, device: str) -> Any:
    """A copy on another device, through Packed and dataclasses."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, Packed):
        return replace(value, parts={name: moved(part, device) for name, part in value.parts.items()})
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def tensors(value: Any) -> list[Tensor]:
    """Every tensor inside."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [t for field in fields(value) for t in tensors(getattr(value, field.name))]
    if isinstance(value, tuple):
        return [t for item in value for t in tensors(item)]
    return []


def runs(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The reference, and every provider that takes the call on an H200."""
    op = REGISTRY[name]
    yield REFERENCE, op.reference
    for provider in op.providers.values():
        if provider.when(Call(args, kwargs, None, H200)) is None:
            yield provider.name, provider.run


CASES = [(name, index) for name, makers in EXAMPLES.items() for index in range(len(makers))]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_providers_on_the_gpu_are_the_reference_on_the_cpu(name: str, index: int) -> None:
    args, kwargs = EXAMPLES[name][index]()
    op = REGISTRY[name]
    bound = inspect.signature(op.reference).bind(*args, **kwargs).arguments
    start = bound.get("query_start")
    rows = None if start is None else int(start[-1])
    low = any(t.dtype == torch.bfloat16 for t in tensors(args))

    def compare(actual: Any, expected: Any, first: int = 0, last: int | None = None) -> None:
        for a, e in zip(tensors(actual), tensors(expected), strict=True):
            a, e = a[first:last].cpu(), e[first:last]
            tolerance = 2e-2 if low else 1e-5
            largest = float(e.nan_to_num(0).abs().max())
            torch.testing.assert_close(a, e, equal_nan=True, rtol=tolerance, atol=tolerance * largest)

    expected_args, expected_kwargs = moved_all(args, kwargs, "cpu")
    expected = op.reference(*expected_args, **expected_kwargs)
    mutated = inspect.signature(op.reference).bind(*expected_args, **expected_kwargs).arguments
    for provider, run in runs(name, args, kwargs):
        for captured in (False, True) if provider != REFERENCE or name in CAPTURABLE else (False,):
            gpu_args, gpu_kwargs = moved_all(args, kwargs, "cuda")
            result = captured_run(run, gpu_args, gpu_kwargs) if captured else run(*gpu_args, **gpu_kwargs)
            compare(result, expected, last=rows)
            after = inspect.signature(op.reference).bind(*gpu_args, **gpu_kwargs).arguments
            for argument in op.mutates:
                compare(after.get(argument), mutated.get(argument), first=1)


def moved_all(args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(moved(a, device) for a in args), {key: moved(a, device) for key, a in kwargs.items()}


def captured_run(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a replayed CUDA graph; what warming up wrote is undone first."""
    inputs = [t for value in (*args, *kwargs.values()) for t in tensors(value)]
    before = [t.clone() for t in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # `before` is copied before anything is written
    with torch.cuda.stream(stream):
        run(*args, **kwargs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(*args, **kwargs)
    for tensor, was in zip(inputs, before, strict=True):
        tensor.copy_(was)
    graph.replay()
    torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_grouped_experts_at_a_real_size(tokens: int) -> None:
    """64 experts of 512 over 2,048, top 8, the last token padding: errors of bfloat16 only."""
    x, gate_up, down = normal(tokens, 2048), normal(64, 1024, 2048) / 45, normal(64, 2048, 512) / 22
    chosen = torch.rand(tokens, 80, generator=torch.Generator().manual_seed(0)).topk(8).indices.int()
    chosen[-1] = -1
    weights = normal(tokens, 8).softmax(-1)
    inputs = [x.bfloat16().cuda(), weights.cuda(), chosen.cuda(), gate_up.bfloat16().cuda(), down.bfloat16().cuda()]
    actual = grouped(*inputs, first_expert=8)
    exact = experts(*[value.double() if value.is_floating_point() else value for value in inputs], first_expert=8)
    assert actual.isfinite().all()
    assert (actual.double() - exact).square().mean().sqrt() <= 1e-2 * exact.square().mean().sqrt()
    assert (actual[-1] == 0).all()
