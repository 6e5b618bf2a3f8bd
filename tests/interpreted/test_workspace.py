"""Scratch memory of Triton providers: what they take at the shapes of real models is what they declare.

Providers run on meta tensors and their kernels aren't started, so every call of a model can be tried at any size.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from checkpoints import CHANNELS
from torch.utils._pytree import tree_leaves
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction

import firstlight.ops  # noqa: F401  registers every op
from firstlight.hardware import H200
from firstlight.models import build_model
from firstlight.models.activations import _LiveBytes
from firstlight.models.walk import record
from firstlight.ops.op import Call, sites
from firstlight.quant import FLOAT8_BY_COLUMN, FLOAT8_BY_TOKEN, Emission, Packed, scheme_of
from firstlight.quant.activations import empty_packed
from firstlight.step import Bucket

CONFIGS = Path(__file__).parents[1] / "configs"
BUCKETS = [
    Bucket(0, 1, 1, 1, 8192, 1),
    Bucket(1, 8, 8, 1, 8192, 8),
    Bucket(2, 32, 32, 1, 8192, 32),
    Bucket(3, 256, 256, 1, 8192, 256),
    Bucket(4, 2048, 256, 2048, 8192, 256),
    Bucket(5, 8192, 256, 8192, 8192, 256),
]
READ_LENGTHS = ("torch_sdpa",)
"""Providers that look at data, so don't run on meta tensors."""
SLACK = 1 << 20
"""Bytes that a call may take undeclared: lists of tiles, counters."""
GENEROUS = 16 << 20
"""Bytes that a provider may declare above twice what it takes: bounds may be plain."""


def calls_of(name, quantization):
    """Every different call of a model in all buckets, composites' parts included: (op, Call)."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    scheme = scheme_of(config, torch.bfloat16)
    model = build_model(config, dtype=torch.bfloat16, scheme=scheme)
    for _, site in sites(model):
        site.unbind(len(BUCKETS))
    found = {}

    def add(op, call):
        key = (
            op.name,
            call.bucket.index,
            repr(
                [
                    (tuple(t.shape), str(getattr(t, "dtype", "")) or str(t.format))
                    for t in call.args
                    if hasattr(t, "shape")
                ]
            ),
        )
        if key in found:
            return
        found[key] = (op, call)
        if op.parts:

            def part(inner, *args, **kwargs):
                add(inner, Call(args, kwargs, call.bucket, H200))
                return inner.abstract(*args, **kwargs)

            op.compose({n: (lambda inner: lambda *a, **k: part(inner, *a, **k))(p) for n, p in op.parts.items()})(
                *call.args, **call.kwargs
            )

    for made in record(model, BUCKETS, H200, 64):
        add(made.site.op, made.call)
    return list(found.values())


def nbytes(value):
    leaves = [
        tensor
        for leaf in tree_leaves(value)
        for tensor in ([*leaf.parts.values(), leaf.plain] if isinstance(leaf, Packed) else [leaf])
        if isinstance(tensor, torch.Tensor)
    ]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in leaves}.values())


def forms(provider, call):
    """A call as it is, and with what a handover changes: its result packed, or its activations."""
    yield call
    if provider.emits:
        for form, plain in product((FLOAT8_BY_TOKEN, FLOAT8_BY_COLUMN), (False, True)):
            yield replace(call, kwargs={**call.kwargs, "emit": Emission(form, plain)})
    if provider.wants is not None and provider.when(call) is None:
        x = call.args[0]
        packed = empty_packed(x.shape, provider.wants, "meta")
        yield replace(call, args=(packed, *call.args[1:]), kwargs={**call.kwargs, "dtype": x.dtype})


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("Qwen3.5-35B-A3B-FP8", None), ("Qwen3.5-35B-A3B", None), ("Qwen3-8B", None), ("Qwen3.5-35B-A3B", CHANNELS)],
    ids=["blocks", "mixture", "plain", "channels"],
)
def test_scratch_memory_is_declared(name, quantization, monkeypatch):
    for kernel in (InterpretedFunction, GluonJITFunction):
        monkeypatch.setattr(kernel, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
    wrong = {}
    tried = set()
    for op, recorded in calls_of(name, quantization):
        for provider, call in [(p, form) for p in op.providers.values() for form in forms(p, recorded)]:
            if provider.name in READ_LENGTHS or provider.when(call) is not None:
                continue
            live = _LiveBytes()
            with torch.inference_mode(), live:
                result = provider.run(*call.args, **call.kwargs)
            used = live.peak - nbytes(result)
            declared = provider.workspace(call) if provider.workspace else 0
            tried.add((op.name, provider.name))
            if used > declared + SLACK:
                held = wrong.get((op.name, provider.name), (0, 0, 0))
                wrong[op.name, provider.name] = max(held, (used, declared, call.bucket.tokens))
    assert {("attention", "triton_paged"), ("attention", "hopper_paged")} <= tried
    if name == "Qwen3.5-35B-A3B-FP8":
        assert {("moe", "hopper_grouped"), ("experts", "hopper_grouped")} <= tried
    if quantization is CHANNELS:
        assert {("linear", "triton_row_fp8"), ("linear", "torch_row_fp8"), ("linear", "triton_skinny")} <= tried
        assert {(op, provider) for op in ("experts", "moe") for provider in ("triton_few", "triton_grouped")} <= tried
        assert not {("experts", "hopper_grouped"), ("moe", "hopper_grouped")} & tried
    assert not wrong
