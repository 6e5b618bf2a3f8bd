"""Example inputs of the ops of recurrent layers and of experts: `EXAMPLES[op name]` makes (args, kwargs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ops.delta_inputs import export_rows, ints, poisoned, rule_inputs, starts
from torch import Tensor

from firstlight.ops.gated_delta_rule import DeltaLog
from firstlight.quant import FLOAT8_BY_COLUMN, WHOLE_ROW, Emission, Weight
from firstlight.quant.blocks import pack_blocks

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same ones every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def step_indices(kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """((query_start, state_in, state_out, exports), {max_query}) of a step over pools of 8 slots; all have 7 tokens."""
    nothing = export_rows()
    return {
        "prefill": (
            (starts([4, 2, 0]), ints(1, 0, 0), ints(1, 2, 0), export_rows((0, 2, 3), (0, 0, 0))),
            {"max_query": 4},
        ),
        "decode": (
            (starts([1] * 6 + [0]), ints(1, 2, 3, 0, 5, 6, 0), ints(1, 2, 3, 4, 5, 0, 0), nothing),
            {"max_query": 1},
        ),
        "each": ((starts([2, 1]), ints(1, 2), torch.stack([ints(3, 4), ints(5, 6)]), nothing), {"max_query": 2}),
        "log": ((starts([4, 2]), ints(1, 0), ints(0, 2), nothing), {"max_query": 4, "log_length": ints(3, 0)}),
    }[kind]


def delta_log(channels: int, dtype: torch.dtype) -> DeltaLog:
    """Logs of 8 slots, rings of 8, with 3 entries at slot 1."""
    log = DeltaLog(
        k=poisoned(8, 8, 2, 16, dtype=dtype),
        u=poisoned(8, 8, 6, 8, dtype=torch.float32),
        g=poisoned(8, 8, 6, dtype=torch.float32),
        conv=poisoned(8, 8, channels, dtype=dtype),
    )
    for ring in (log.k, log.u, log.g, log.conv):
        ring[1, :3] = normal(3, *ring.shape[2:], dtype=ring.dtype)
    log.g[1].abs_().neg_()
    return log


def pool(*shape: int, dtype: torch.dtype) -> Tensor:
    """A pool of 8 slots, slot 0 poisoned."""
    rows = normal(8, *shape, dtype=dtype)
    rows[0] = float("nan")
    return rows


def conv_example(kind: str, dtype: torch.dtype) -> Inputs:
    indices, options = step_indices(kind)
    if kind == "log":
        options["log"] = delta_log(10, dtype).conv
    return (normal(7, 10, dtype=dtype), normal(10, 4, dtype=dtype), pool(10, 3, dtype=dtype), *indices), options


def rule_example(kind: str, dtype: torch.dtype) -> Inputs:
    indices, options = step_indices(kind)
    if kind == "log":
        options["log"] = delta_log(1, dtype)
    return (*rule_inputs(7, dtype=dtype), pool(6, 8, 16, dtype=torch.float32), *indices), options


def gated_delta_example(kind: str, dtype: torch.dtype, value_dim: int = 8, **options: Any) -> Inputs:
    """2 key heads of 16, 6 value heads: 112 channels if these have 8 values."""
    indices, bounds = step_indices(kind)
    channels, values = 64 + 6 * value_dim, 6 * value_dim
    if kind == "log":
        bounds["log"] = delta_log(channels, dtype)
    tensors = (
        normal(7, channels, dtype=dtype),
        normal(7, values, dtype=dtype),
        normal(7, 6, dtype=dtype),
        normal(7, 6, dtype=dtype, seed=1),
        normal(channels, 4, dtype=dtype),
        normal(6),
        normal(6, dtype=dtype),
        normal(value_dim),
        pool(channels, 3, dtype=dtype),
        pool(6, value_dim, 16, dtype=torch.float32),
    )
    sizes = {"key_heads": 2, "value_heads": 6, "key_dim": 16, "value_dim": value_dim, "eps": 1e-6}
    return (*tensors, *indices), {**sizes, **bounds, **options}


def route_example(logits_dtype: torch.dtype, **options: Any) -> Inputs:
    return (normal(5, 12, dtype=logits_dtype),), {"top_k": 3, "renormalise": True, **options}


def experts_example(dtype: torch.dtype, block: tuple[int, int] | None) -> Inputs:
    """5 tokens, 3 of 4 local experts each or none; 24 hidden, 10 intermediate."""
    gate_up, down = normal(4, 20, 24), normal(4, 24, 10)
    chosen = torch.tensor([[2, 5, 0], [-1, -1, -1], [9, 3, 4], [2, 3, 4], [5, 4, 2]], dtype=torch.int32)
    if block is None:
        weights: tuple[Weight, Weight] = gate_up.to(dtype), down.to(dtype)
    else:
        form = block, torch.float8_e4m3fn, torch.float32
        weights = pack_blocks(gate_up, *form), pack_blocks(down, *form)
    return (normal(5, 24, dtype=dtype), normal(5, 3, dtype=dtype).abs(), chosen, *weights), {"first_expert": 2}


def moe_example(dtype: torch.dtype, shared: bool, gated: bool) -> Inputs:
    args = (
        normal(5, 24, dtype=dtype),
        normal(8, 24, dtype=dtype),
        normal(4, 20, 24, dtype=dtype),
        normal(4, 24, 10, dtype=dtype),
        normal(14, 24, dtype=dtype) if shared else None,
        normal(24, 7, dtype=dtype) if shared else None,
        normal(1, 24, dtype=dtype) if gated else None,
    )
    return args, {"live": torch.tensor([4]), "top_k": 3, "renormalise": True, "first_expert": 4}


KINDS = ("prefill", "decode", "each", "log")
DTYPES = (torch.float32, torch.bfloat16)

EXAMPLES: dict[str, list[Callable[[], Inputs]]] = {
    "causal_conv": [lambda k=k, d=d: conv_example(k, d) for k in KINDS for d in DTYPES],
    "delta_gates": [
        lambda d=d: ((normal(5, 6, dtype=d), normal(5, 6, dtype=d), normal(6), normal(6, dtype=d)), {}) for d in DTYPES
    ],
    "l2_norm": [
        lambda d=d: ((normal(5, 100, dtype=d)[:, 3:51].unflatten(1, (3, 16)),), {"scale": 0.25}) for d in DTYPES
    ],
    "gated_delta_rule": [lambda k=k, d=d: rule_example(k, d) for k in KINDS for d in DTYPES],
    "gated_delta": [
        *(lambda k=k, d=d: gated_delta_example(k, d) for k in KINDS for d in DTYPES),
        lambda: gated_delta_example(KINDS[0], torch.bfloat16, 64, emit=Emission(FLOAT8_BY_COLUMN, plain=False)),
    ],
    "route": [
        *[lambda d=d: route_example(d, live=torch.tensor([3]), dtype=torch.bfloat16) for d in DTYPES],
        lambda: route_example(torch.float32, scoring="sigmoid", bias=normal(12), groups=4, top_groups=2, scale=2.5),
    ],
    "experts": [lambda d=d, b=b: experts_example(d, b) for d in DTYPES for b in (None, (8, 8), (1, WHOLE_ROW))],
    "moe": [
        lambda d=d, s=s, g=g: moe_example(d, s, g)
        for d in DTYPES
        for s, g in ((False, False), (True, False), (True, True))
    ],
}
