"""Example inputs of the ops of latent and of channel-wise linear attention: `EXAMPLES[op name]` makes (args, kwargs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ops.examples_a import normal, paged_batch
from ops.examples_b import step_indices

from firstlight.quant.blocks import pack_blocks

Example = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
HEADS, NOPE, TURNED, VALUE, LATENT = 3, 8, 4, 6, 16


def latent_batch(
    counts: list[int], lengths: list[int], *, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Inputs of `latent_attention` but the weight; rows that hold no key are NaN."""
    batch = paged_batch(counts, lengths, heads=HEADS, kv_heads=1, dim=LATENT + TURNED, dtype=dtype)
    return {
        "q": normal(sum(counts), HEADS, NOPE + TURNED, dtype=dtype),
        "latent_pages": batch["k_pages"],
        **{name: batch[name] for name in ("pages", "row", "query_start", "length")},
    }


def attention_example(packed: bool, selected: bool, absorbed: bool, dtype: torch.dtype = torch.float32) -> Example:
    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = latent_batch([1, 3, 2], [5, 9, 2], dtype=dtype)
        weight = normal(HEADS * (NOPE + VALUE), LATENT, dtype=dtype)
        kv_b = pack_blocks(weight, (16, 16), torch.float8_e4m3fn, torch.float32) if packed else weight
        kwargs = {
            "nope": NOPE, "value_dim": VALUE, "scale": 0.3, "max_query": 3, "max_context": 9, "absorbed": absorbed,
        }  # fmt: skip
        if selected:
            kwargs["selected"] = torch.tensor([[4, 0], [6, -1], [0, 7], [8, 2], [0, -1], [1, 0]], dtype=torch.int32)
        return (*batch.values(), kv_b), kwargs

    return make


def write_example() -> tuple[tuple[Any, ...], dict[str, Any]]:
    slot = torch.tensor([9, 4, 2], dtype=torch.int64)
    return (normal(3, LATENT), normal(3, TURNED), torch.zeros(4, 4, 1, LATENT + TURNED), slot), {}


def prologue_example(turns: bool) -> Example:
    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        angles = normal(3, TURNED) if turns else None
        pages, slot = torch.zeros(4, 4, 1, LATENT + TURNED), torch.tensor([9, 4, 5])
        q, kv = normal(3, HEADS * (NOPE + TURNED)), normal(3, LATENT + TURNED)
        return (q, kv, normal(LATENT), angles, pages, slot), {"heads": HEADS, "nope": NOPE, "eps": 1e-6}

    return make


def select_example(top: int) -> Example:
    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = paged_batch([1, 3, 2], [5, 9, 2], heads=4, kv_heads=1, dim=8)
        indices = (batch[name] for name in ("pages", "row", "query_start", "length"))
        kwargs = {"top": top, "scale": 0.2, "max_query": 3, "max_context": 9}
        return (batch["q"], normal(6, 4), batch["k_pages"], *indices), kwargs

    return make


def delta_example(kind: str) -> Example:
    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows, kwargs = step_indices(kind)
        tokens, heads, dim = 7, 2, 4
        q, k, v = (normal(tokens, heads, dim, seed=i) for i in range(3))
        g, beta = -normal(tokens, heads, dim).abs(), normal(tokens, heads).sigmoid()
        return (q, k, v, g, beta, normal(8, heads, dim, dim), *rows), kwargs

    return make


def mixer_example(kind: str) -> Example:
    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows, kwargs = step_indices(kind)
        tokens, heads, dim = 7, 2, 4
        width = heads * dim
        inputs = (normal(tokens, 3 * width), normal(tokens, width), normal(tokens, heads))
        weights = (normal(3 * width, 4), normal(heads), normal(width))
        pools = (normal(8, 3 * width, 3), normal(8, heads, dim, dim))
        return (*inputs, *weights, *pools, *rows), {**kwargs, "heads": heads, "dim": dim}

    return make


def gates_example() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (normal(5, 8, dtype=torch.bfloat16), normal(5, 2, dtype=torch.bfloat16), normal(2), normal(8)), {}


def clamped_example(dtype: torch.dtype) -> Example:
    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens, hidden, inner, experts = 5, 8, 6, 3
        chosen = torch.tensor([[0, 2], [1, -1], [2, 1], [0, 1], [2, 0]], dtype=torch.int32)
        args = (
            normal(tokens, hidden, dtype=dtype) * 4, normal(tokens, 2).abs(), chosen,
            normal(experts, 2 * inner, hidden, dtype=dtype), normal(experts, 2 * inner, dtype=dtype),
            normal(experts, hidden, inner, dtype=dtype), normal(experts, hidden, dtype=dtype),
        )  # fmt: skip
        return args, {"limit": 1.5}

    return make


EXAMPLES: dict[str, list[Example]] = {
    "latent_attention": [
        attention_example(False, False, True),
        attention_example(True, False, False),
        attention_example(False, True, True),
        attention_example(False, False, False, torch.bfloat16),
    ],
    "channel_delta": [mixer_example("prefill"), mixer_example("decode")],
    "channel_delta_rule": [delta_example("prefill"), delta_example("decode"), delta_example("each")],
    "channel_gates": [gates_example],
    "clamped_experts": [clamped_example(torch.float32), clamped_example(torch.bfloat16)],
    "write_latent": [write_example],
    "select_keys": [select_example(3), select_example(16)],
    "latent_prologue": [prologue_example(True), prologue_example(False)],
}
