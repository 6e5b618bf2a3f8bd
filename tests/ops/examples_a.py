"""Example inputs of ops: `EXAMPLES[op name]` makes (args, kwargs), small and with odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from firstlight.parallel import Group
from firstlight.quant import FLOAT8_BY_COLUMN, Emission
from firstlight.quant.activations import quantise
from firstlight.quant.blocks import pack_blocks

PACKED, BOTH = Emission(FLOAT8_BY_COLUMN, plain=False), Emission(FLOAT8_BY_COLUMN, plain=True)
Example = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
ALONE = Group("tp")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same ones every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def paged_batch(
    counts: list[int],
    lengths: list[int],
    *,
    size: int = 4,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    pages_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Inputs of `attention`: requests with `counts` new tokens each and contexts of `lengths`. pages_dtype: if not `dtype`.

    Pages are dealt out in a shuffled order; all rows of the pools that hold no key are NaN, page 0 among them. `padding`
    adds that many tokens, and as many empty requests, behind the real ones.
    """
    generator = torch.Generator().manual_seed(sum(lengths) + size)
    needed = [-(-length // size) for length in lengths]
    order = (torch.randperm(sum(needed) + 2, generator=generator) + 1).tolist()
    columns = max(needed) + 1
    table = torch.zeros(len(counts) + padding + 1, columns, dtype=torch.int32)
    k_pages = torch.full((len(order) + 1, size, kv_heads, dim), torch.nan, dtype=dtype)
    v_pages = k_pages.clone()
    rows = torch.arange(len(counts), 0, -1).tolist()  # request r does not use row r
    for row, count, length in zip(rows, needed, lengths, strict=True):
        mine = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        for j in range(length):
            for pool in (k_pages, v_pages):
                pool[mine[j // size], j % size] = torch.randn(kv_heads, dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *counts, *[0] * padding]).cumsum(0).int()
    return {
        "q": torch.randn(sum(counts) + padding, heads, dim, generator=generator).to(dtype),
        "k_pages": k_pages.to(pages_dtype or dtype),
        "v_pages": v_pages.to(pages_dtype or dtype),
        "pages": table,
        "row": torch.tensor([*rows, *[0] * padding], dtype=torch.int32),
        "query_start": starts,
        "length": torch.tensor([*lengths, *[0] * padding], dtype=torch.int32),
    }


def _attention(
    counts: list[int], lengths: list[int], pages_dtype: torch.dtype | None = None, **settings: Any
) -> Example:
    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        bounds = {"scale": 0.3, "max_query": max(counts), "max_context": max(lengths)}
        return tuple(paged_batch(counts, lengths, padding=1, pages_dtype=pages_dtype).values()), bounds | settings

    return make


def _prologue(**settings: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    columns = (3 * (1 + settings.get("gated", False)) + 2) * 8
    dtype = settings.pop("pages_dtype", torch.float32)
    pools = (torch.zeros(3, 4, 1, 8, dtype=dtype), torch.zeros(3, 4, 1, 8, dtype=dtype))
    norms = (normal(8), normal(8)) if settings.pop("normed") else (None, None)
    tensors = (normal(5, columns), *norms, normal(5, 4), *pools, torch.tensor([4, 5, 11, 0, 0]))
    return tensors, {"heads": 3, "kv_heads": 1, "head_dim": 8} | settings


def _sample(**settings: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rows = torch.arange(3)
    return (normal(3, 17), rows * 0.5, rows, rows * 0.4 + 0.2, rows * 7, rows + 5), settings


EXAMPLES: dict[str, list[Example]] = {
    "embedding": [
        lambda: ((torch.tensor([0, 6, 3]), normal(7, 5)), {}),
        lambda: ((torch.tensor([0, 9, 3], dtype=torch.int32), normal(7, 5, dtype=torch.bfloat16)), {"start": 7}),
        lambda: (
            (torch.tensor([6]), pack_blocks(normal(7, 5), (1, 5), torch.float8_e4m3fn, torch.float32)),
            {"dtype": torch.bfloat16},
        ),
    ],
    "replace_rows": [lambda: ((normal(3, 5), torch.tensor([0, 2, -1]), normal(4, 5)), {})],
    "gather_rows": [lambda: ((normal(3, 5), torch.tensor([2, 0], dtype=torch.int32)), {})],
    "rms_norm": [
        lambda: ((normal(3, 5), normal(5)), {"eps": 1e-6}),
        lambda: ((normal(3, 2, 5, dtype=torch.bfloat16), normal(5)), {"eps": 1e-5, "zero_centred": True}),
        lambda: ((normal(3, 4, 5)[:, ::2], normal(5)), {"eps": 1e-6}),
        lambda: ((normal(3, 256, dtype=torch.bfloat16), normal(256)), {"eps": 1e-6, "emit": PACKED}),
    ],
    "add": [lambda: ((normal(3, 5), normal(3, 5, seed=1)), {})],
    "add_rms_norm": [
        lambda: ((normal(3, 5), normal(3, 5, seed=1), normal(5)), {"eps": 1e-6}),
        lambda: ((normal(3, 5), normal(3, 5, seed=1), normal(5)), {"eps": 1e-6, "zero_centred": True, "group": ALONE}),
        lambda: ((normal(17, 128), normal(17, 128, seed=1), normal(128)), {"eps": 1e-6, "emit": BOTH}),
    ],
    "gated_rms_norm": [lambda: ((normal(3, 2, 5), normal(3, 2, 5, seed=1), normal(5)), {"eps": 1e-6})],
    "layer_norm": [lambda: ((normal(3, 5, dtype=torch.float16), normal(5), normal(5, seed=1)), {"eps": 1e-6})],
    "gelu": [
        lambda: ((normal(3, 5),), {"approximate": "none"}),
        lambda: ((normal(3, 5, dtype=torch.bfloat16),), {"approximate": "tanh"}),
    ],
    "linear": [
        lambda: ((normal(3, 5), normal(7, 5)), {}),
        lambda: ((normal(3, 5, dtype=torch.bfloat16), normal(7, 5), normal(7)), {}),
        lambda: ((normal(3, 5), pack_blocks(normal(7, 5), (4, 4), torch.float8_e4m3fn, torch.bfloat16)), {}),
        lambda: (
            (pack_blocks(normal(3, 5), (1, 4), torch.float8_e4m3fn, torch.float32), normal(7, 5)),
            {"dtype": torch.bfloat16},
        ),
        lambda: ((quantise(normal(16, 256), FLOAT8_BY_COLUMN), normal(7, 256)), {"dtype": torch.bfloat16}),
    ],
    "silu_mul": [lambda: ((normal(3, 10),), {}), lambda: ((normal(3, 256),), {"emit": PACKED})],
    "sigmoid_mul": [
        lambda: ((normal(3, 5), normal(3, 5, seed=1)), {}),
        lambda: ((normal(3, 5), normal(3, 1)), {}),
        lambda: ((normal(3, 128), normal(3, 128, seed=1)), {"emit": BOTH}),
    ],
    "rope_angles": [
        lambda: ((torch.tensor([0, 5, 9], dtype=torch.int32), normal(8).abs()), {"factor": 1.5}),
        lambda: ((torch.arange(9).reshape(3, 3), normal(8).abs()), {"sections": (3, 3, 2)}),
    ],
    "rope": [
        lambda: ((normal(3, 2, 8), normal(3, 8)), {}),
        lambda: ((normal(3, 2, 8, dtype=torch.bfloat16), normal(3, 4)), {"interleaved": True}),
    ],
    "write_kv": [
        lambda: (
            (
                normal(3, 2, 8),
                normal(3, 2, 8),
                torch.zeros(3, 4, 2, 8),
                torch.zeros(3, 4, 2, 8),
                torch.tensor([4, 9, 0]),
            ),
            {},
        )
    ],
    "attention_prologue": [
        lambda: _prologue(normed=False),
        lambda: _prologue(normed=True, gated=True, eps=1e-5, zero_centred=True),
        lambda: _prologue(normed=True, pages_dtype=torch.float8_e4m3fn),
    ],
    "attention": [
        _attention([1, 1, 1], [5, 1, 9]),
        _attention([3, 1, 9], [5, 7, 9], window=3),
        _attention([3, 1], [5, 7], causal=False, sinks=normal(6)),
        _attention([2], [5], out=torch.zeros(3, 6, 8)),
        _attention([1, 1], [5, 9], pages_dtype=torch.float8_e4m3fn),
    ],
    "segment_attention": [
        lambda: (
            (normal(9, 2, 5), normal(9, 2, 5, seed=1), normal(9, 2, 5, seed=2), torch.tensor([0, 4, 4, 8])),
            {"scale": 0.4, "max_segment": 4},
        )
    ],
    "sample": [lambda: _sample(), lambda: _sample(greedy=True), lambda: _sample(filtered=False)],
    "all_reduce": [lambda: ((normal(3, 5), ALONE), {})],
    "all_gather": [lambda: ((normal(3, 5), ALONE), {"dim": -1})],
}
