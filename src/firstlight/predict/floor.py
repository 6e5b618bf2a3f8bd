"""The least time of an op from its sizes: what tables are divided by to give efficiencies, and where rows stand.

The same formulas price a step, with the flops and bytes that were walked: the larger of operations over the peak and bytes
over the bandwidth, operations padded to the tiles of the matrix units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from firstlight.hardware import Hardware
from firstlight.predict import constants
from firstlight.predict.shape import Numbers

Sizes = Mapping[str, Any]
"""Sizes by name: numbers, or arrays of the rows of a table."""
BYTES = {"bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0, "float32": 4.0, "mxfp4": 17 / 32}
"""Of a stored element; MXFP4 has a byte of scale for 32 elements of 4 bits."""


def peak(hardware: Hardware, dtype: str) -> float:
    """Operations a second in a dtype; the nearest wider one's where the hardware has none of it."""
    for name in (dtype, "bfloat16", "float32"):
        if name in hardware.peak:
            return hardware.peak[name]
    raise ValueError(f"{hardware.name} is described without peaks, so times can't be predicted for it")


def multiplied(form: str, hardware: Hardware) -> str:
    """What weights in a format are multiplied in: MXFP4 with FP8 activations where the matrix units mix them, else in BF16."""
    if form != "mxfp4":
        return form
    return "float8_e4m3fn" if "float4_e2m1fn_x2" in hardware.peak else "bfloat16"


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
    of it by as much more or less. along, across: the sizes that a step sets; most ops have one, attention to prompts the tokens of
    all and the query of one.
    """

    kind: str
    floor: Callable[[Sizes, Hardware, str], Numbers]
    place: Callable[[Sizes], tuple[Any, ...]]
    along: str
    across: str = ""


def product_bytes(rows: float, columns: float, form: str) -> float:
    """Bytes that a product moves for each of its tokens: the input in the format of the multiply, the result in bfloat16."""
    return columns * BYTES[form] + 2.0 * rows


def expert_row_bytes(hidden: float, inner: float, form: str) -> float:
    """The same for a token in an expert: two products, gate and up side by side in the first."""
    return product_bytes(2 * inner, hidden, form) + product_bytes(hidden, inner, form)


def _linear(sizes: Sizes, gpu: Hardware, form: str) -> Numbers:
    m, n, k = sizes["tokens"], sizes["rows"], sizes["columns"]
    flops = 2.0 * padded(m) * n * k
    moved = n * k * BYTES[form] + m * product_bytes(n, k, form)
    return np.maximum(flops / peak(gpu, form), moved / gpu.bandwidth)


def product_rate(sizes: Sizes, seconds: Numbers) -> Numbers:
    """Operations a second of a product that took so long."""
    return 2.0 * sizes["tokens"] * sizes["rows"] * sizes["columns"] / seconds


def _experts(sizes: Sizes, gpu: Hardware, form: str) -> Numbers:
    held, hidden, inner = sizes["experts"], sizes["hidden"], sizes["intermediate"]
    assignments = sizes["tokens"] * sizes["top_k"]  # each rank sends as many as it gets
    used = np.minimum(held, assignments)  # tables deal tokens out evenly
    rows = padded_experts(assignments, used)
    dtype = multiplied(form, gpu)
    moved = used * 3.0 * hidden * inner * BYTES[form] + assignments * expert_row_bytes(hidden, inner, dtype)
    return np.maximum(rows * 6.0 * hidden * inner / peak(gpu, dtype), moved / gpu.bandwidth)


def expert_tokens(sizes: Sizes) -> Any:
    """Rows of one expert on average."""
    return sizes["tokens"] * sizes["top_k"] / sizes["experts"]


def _attention(sizes: Sizes, gpu: Hardware, form: str) -> Numbers:
    requests, query, context = sizes["requests"], sizes["query"], sizes["context"]
    pairs = requests * (query * context - query * (query - 1) / 2)
    flops = 4.0 * pairs * sizes["heads"] * sizes["head_dim"]
    row = 2.0 * sizes["kv_heads"] * sizes["head_dim"] * BYTES[form]
    moved = requests * (context * row + 4.0 * query * sizes["heads"] * sizes["head_dim"])
    return np.maximum(flops / peak(gpu, "bfloat16"), moved / gpu.bandwidth)


LATENT, LATENT_ROPE, HEAD, HEAD_ROPE = 512, 64, 128, 64
"""Sizes of the multi-head latent attention that tables were measured with: DeepSeek-V3's."""


def _latent_decode(sizes: Sizes, gpu: Hardware, form: str) -> Numbers:
    keys = sizes["requests"] * sizes["context"]
    flops = 2.0 * keys * sizes["heads"] * (2 * LATENT + LATENT_ROPE)
    return np.maximum(flops / peak(gpu, "bfloat16"), keys * (LATENT + LATENT_ROPE) * BYTES[form] / gpu.bandwidth)


def _latent_prefill(sizes: Sizes, gpu: Hardware, form: str) -> Numbers:
    query, context = sizes["query"], sizes["context"]
    pairs = sizes["requests"] * (query * context - query * (query - 1) / 2)
    return 2.0 * pairs * sizes["heads"] * (2 * HEAD + HEAD_ROPE) / peak(gpu, "bfloat16")


def _delta_decode(sizes: Sizes, gpu: Hardware, form: str) -> Numbers:
    state = sizes["heads"] * sizes["value_dim"] * sizes["key_dim"] * BYTES[form]
    return 2.0 * sizes["requests"] * state / gpu.bandwidth


CHUNK = 64
"""Tokens that chunked delta rules take at a time."""
DELTA_OPERATIONS = 7.0
"""Of a delta rule, for each element of the state and token: decay, two products, two sums (see the op's cost)."""


def chunk_seconds(value_dim: float, key_dim: float, gpu: Hardware) -> float:
    """The least that one processor takes for one chunk of one head."""
    return CHUNK * value_dim * key_dim * DELTA_OPERATIONS * gpu.multiprocessors / peak(gpu, "bfloat16")


def _delta_prefill(sizes: Sizes, gpu: Hardware, form: str) -> Numbers:
    """A head of a request is a chain of chunks on one processor; more of them than processors queue."""
    heads = np.ceil(sizes["requests"] * sizes["heads"] / gpu.multiprocessors)
    return heads * sizes["query"] / CHUNK * chunk_seconds(sizes["value_dim"], sizes["key_dim"], gpu)


def sent_bytes(sizes: Sizes) -> Any:
    """Bytes that a rank of an all-reduce sends: all but its own share, to reduce and to spread."""
    return 2.0 * sizes["bytes"] * (sizes["ranks"] - 1) / sizes["ranks"]


def _all_reduce(sizes: Sizes, gpu: Hardware, form: str) -> Numbers:
    return sent_bytes(sizes) / gpu.links[0].bandwidth


def _keys(sizes: Sizes) -> Any:
    """Keys of a decode step: a table's own, or the size that the curve runs along."""
    return sizes["keys"] if "keys" in sizes else sizes["requests"] * sizes["context"]


def _tokens(sizes: Sizes) -> Any:
    """New tokens of a prefill, likewise."""
    return sizes["tokens"] if "tokens" in sizes else sizes["requests"] * sizes["query"]


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
        "attention", _attention, lambda s: (_tokens(s) * s["heads"], s["query"], s["head_dim"]), "tokens", "query"
    ),
    ("latent_attention", "decode"): Floor("attention", _latent_decode, lambda s: (_keys(s), s["heads"]), "keys"),
    ("latent_attention", "prefill"): Floor(
        "attention", _latent_prefill, lambda s: (_tokens(s) * s["heads"], s["query"]), "tokens", "query"
    ),
    **{
        (op, "decode"): Floor(
            "state", _delta_decode, lambda s: (s["requests"] * s["heads"], s["value_dim"]), "requests"
        )
        for op in ("gated_delta_rule", "channel_delta_rule")
    },
    **{
        (op, "prefill"): Floor("chunks", _delta_prefill, lambda s: (s["query"], s["heads"] ** 0.25), "query")
        for op in ("gated_delta_rule", "channel_delta_rule")
    },
    ("all_reduce", ""): Floor("all_reduce", _all_reduce, lambda s: (s["bytes"], s["ranks"] ** 2), "bytes"),
}
"""By (op, label)."""
