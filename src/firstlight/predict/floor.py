"""The least time of an op from its sizes: what tables are divided by to give efficiencies, and where rows stand.

The same formulas price a step, with the flops and bytes that were walked: the larger of operations over the peak and bytes
over the bandwidth, operations padded to the tiles of the matrix units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from firstlight.hardware import Hardware
from firstlight.predict import constants
from firstlight.predict.shape import Numbers

Sizes = Mapping[str, float]
BYTES = {"bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0, "float32": 4.0}


def peak(hardware: Hardware, dtype: str) -> float:
    """Operations a second in a dtype; the nearest wider one's where the hardware has none of it."""
    for name in (dtype, "bfloat16", "float32"):
        if name in hardware.peak:
            return hardware.peak[name]
    raise ValueError(f"{hardware.name} is described without peaks, so times can't be predicted for it")


def padded(tokens: Numbers) -> Numbers:
    """Rows that a product of `tokens` rows computes."""
    tile = constants.MATRIX_TILE_ROWS
    return np.ceil(np.asarray(tokens) / tile) * tile


def padded_experts(assignments: Numbers, used: Numbers) -> Numbers:
    """Rows that a grouped product computes: each of `used` experts fills whole tiles, the last one half on average."""
    tile = constants.MATRIX_TILE_ROWS
    return np.maximum(used * tile, assignments + used * tile / 2)


@dataclass(frozen=True, slots=True)
class Floor:
    """An op in tables.

    kind: whose start it has. floor: seconds at the peaks. place: where a row stands; a size counts as its logarithm, so a power
    of it by as much more or less. along: the size that a step sets.
    """

    kind: str
    floor: Callable[[Sizes, Hardware, str], float]
    place: Callable[[Sizes], tuple[float, ...]]
    along: str


def product_bytes(rows: float, columns: float, form: str) -> float:
    """Bytes that a product moves for each of its tokens: the input in the format of the multiply, the result in bfloat16."""
    return columns * BYTES[form] + 2.0 * rows


def expert_row_bytes(hidden: float, inner: float, form: str) -> float:
    """The same for a token in an expert: two products, gate and up side by side in the first."""
    return product_bytes(2 * inner, hidden, form) + product_bytes(hidden, inner, form)


def _linear(sizes: Sizes, gpu: Hardware, form: str) -> float:
    m, n, k = sizes["tokens"], sizes["rows"], sizes["columns"]
    flops = 2.0 * float(padded(np.asarray(m))) * n * k
    moved = n * k * BYTES[form] + m * product_bytes(n, k, form)
    return max(flops / peak(gpu, form), moved / gpu.bandwidth)


def _experts(sizes: Sizes, gpu: Hardware, form: str) -> float:
    held, hidden, inner = sizes["experts"], sizes["hidden"], sizes["intermediate"]
    assignments = sizes["tokens"] * sizes["top_k"]  # each rank sends as many as it gets
    used = min(held, assignments)  # tables deal tokens out evenly
    rows = float(padded_experts(np.asarray(assignments), np.asarray(used)))
    moved = used * 3.0 * hidden * inner * BYTES[form] + assignments * expert_row_bytes(hidden, inner, form)
    return max(rows * 6.0 * hidden * inner / peak(gpu, form), moved / gpu.bandwidth)


def expert_tokens(sizes: Sizes) -> float:
    """Rows of one expert on average."""
    return sizes["tokens"] * sizes["top_k"] / sizes["experts"]


def _attention(sizes: Sizes, gpu: Hardware, form: str) -> float:
    requests, query, context = sizes["requests"], sizes["query"], sizes["context"]
    pairs = requests * (query * context - query * (query - 1) / 2)
    flops = 4.0 * pairs * sizes["heads"] * sizes["head_dim"]
    row = 2.0 * sizes["kv_heads"] * sizes["head_dim"] * BYTES[form]
    moved = requests * (context * row + 4.0 * query * sizes["heads"] * sizes["head_dim"])
    return max(flops / peak(gpu, "bfloat16"), moved / gpu.bandwidth)


LATENT, LATENT_ROPE, HEAD, HEAD_ROPE = 512, 64, 128, 64
"""Sizes of the multi-head latent attention that tables were measured with: DeepSeek-V3's."""


def _latent_decode(sizes: Sizes, gpu: Hardware, form: str) -> float:
    keys = sizes["requests"] * sizes["context"]
    flops = 2.0 * keys * sizes["heads"] * (2 * LATENT + LATENT_ROPE)
    return max(flops / peak(gpu, "bfloat16"), keys * (LATENT + LATENT_ROPE) * BYTES[form] / gpu.bandwidth)


def _latent_prefill(sizes: Sizes, gpu: Hardware, form: str) -> float:
    query, context = sizes["query"], sizes["context"]
    pairs = sizes["requests"] * (query * context - query * (query - 1) / 2)
    return 2.0 * pairs * sizes["heads"] * (2 * HEAD + HEAD_ROPE) / peak(gpu, "bfloat16")


def _delta_decode(sizes: Sizes, gpu: Hardware, form: str) -> float:
    state = sizes["heads"] * sizes["value_dim"] * sizes["key_dim"] * BYTES[form]
    return 2.0 * sizes["requests"] * state / gpu.bandwidth


def _keys(sizes: Sizes) -> float:
    """Keys of a decode step: a table's own, or the size that the curve runs along."""
    return sizes["keys"] if "keys" in sizes else sizes["requests"] * sizes["context"]


FAMILIES: dict[tuple[str, str], Floor] = {
    ("linear", ""): Floor(
        "product",
        _linear,
        lambda s: (s["tokens"], s["rows"] * s["columns"], (s["rows"] / s["columns"]) ** 0.5),
        "tokens",
    ),
    ("experts", ""): Floor(
        "experts",
        _experts,
        lambda s: (
            s["assigned"] if "assigned" in s else expert_tokens(s),
            s["experts"],
            s["hidden"] * s["intermediate"],
        ),
        "assigned",
    ),
    ("attention", "decode"): Floor(
        "attention",
        _attention,
        lambda s: (_keys(s) * s["kv_heads"], (s["heads"] / s["kv_heads"]) ** 2, s["head_dim"]),
        "keys",
    ),
    ("attention", "prefill"): Floor(
        "attention", _attention, lambda s: (s["query"], s["heads"] ** 0.5, s["head_dim"]), "query"
    ),
    ("latent_attention", "decode"): Floor("attention", _latent_decode, lambda s: (_keys(s), s["heads"]), "keys"),
    ("latent_attention", "prefill"): Floor(
        "attention", _latent_prefill, lambda s: (s["query"], s["heads"] ** 0.5), "query"
    ),
    **{
        (op, "decode"): Floor(
            "state", _delta_decode, lambda s: (s["requests"] * s["heads"], s["value_dim"]), "requests"
        )
        for op in ("gated_delta_rule", "channel_delta_rule")
    },
}
"""By (op, label)."""
