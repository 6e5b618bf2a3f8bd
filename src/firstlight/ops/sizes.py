"""The sizes of a call: what the time of a kernel depends on, by the names that calibration tables use.

A step sets some of them (`step`: tokens, requests, query, context), the model the others (`fixed`). Ops without a reader of
their own have the shape of their first tensor, and what a step sets if they take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from firstlight.ops.op import Op
from firstlight.quant import Packed, dtype_name

Given = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a call. format: how the weight or the cache rows are stored, or what flows. dtype: of what flows."""

    step: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    format: str = ""
    dtype: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """For dictionaries."""
        return (self.format, self.dtype, *sorted(self.fixed.items()), *sorted(self.step.items()))


@cache
def _names(op: Op) -> tuple[str, ...]:
    return tuple(op.signature.parameters)


def sizes_of(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sizes:
    """The sizes of a call, from its tensors' shapes alone (meta tensors will do)."""
    given = {**dict(zip(_names(op), args, strict=False)), **kwargs}
    return READERS.get(op.name, _plain)(given)


BY_ROW = "/row"
"""Behind the dtype of a weight with a scale a row, whose kernels aren't those of blocks."""


def stored(value: Any) -> str:
    """The dtype or block type that a weight is stored in."""
    if not isinstance(value, Packed):
        return dtype_name(value.dtype)
    return value.format.dtype + (BY_ROW if value.format.by_row else "")


def element(form: str) -> str:
    """The dtype of the elements of a weight that is `stored` so."""
    return form.removesuffix(BY_ROW)


def _step(given: Given, tokens: int) -> dict[str, int]:
    """What a step sets, for an op that takes bounds of its requests; tokens alone for others."""
    if "query_start" not in given or "max_query" not in given:
        return {"tokens": tokens}
    step = {"tokens": tokens, "requests": given["query_start"].shape[0] - 1, "query": given["max_query"]}
    return step | ({"context": given["max_context"]} if "max_context" in given else {})


def _plain(given: Given) -> Sizes:
    """[T, ...]: tokens, and the trailing sizes as heads and columns."""
    x = next(value for value in given.values() if isinstance(value, torch.Tensor | Packed))
    tokens, *rest = x.shape
    fixed = {"columns": rest[-1]} if rest else {}
    if len(rest) > 1:
        fixed["heads"] = torch.Size(rest[:-1]).numel()
    group = given.get("group")
    if group is not None and group.size > 1:
        fixed["ranks"] = group.size
    return Sizes(_step(given, tokens), fixed, stored(x), stored(x))


def _linear(given: Given) -> Sizes:
    x, weight = given["x"], given["weight"]
    flows = dtype_name(given["dtype"]) if isinstance(x, Packed) else stored(x)
    sizes = {"rows": weight.shape[0], "columns": weight.shape[1]}
    return Sizes({"tokens": x.shape[0]}, sizes, stored(weight), flows)


def _experts(given: Given) -> Sizes:
    held, twice, hidden = given["gate_up"].shape
    sizes = {"experts": held, "top_k": given["experts"].shape[1], "hidden": hidden, "intermediate": twice // 2}
    return Sizes({"tokens": given["x"].shape[0]}, sizes, stored(given["gate_up"]), stored(given["x"]))


def _moe(given: Given) -> Sizes:
    held, twice, hidden = given["gate_up"].shape
    shared = given["shared_gate_up"]
    sizes = {"experts": held, "top_k": given["top_k"], "hidden": hidden, "intermediate": twice // 2}
    sizes["shared"] = 0 if shared is None else shared.shape[0] // 2
    return Sizes({"tokens": given["x"].shape[0]}, sizes, stored(given["gate_up"]), stored(given["x"]))


def _route(given: Given) -> Sizes:
    tokens, experts = given["logits"].shape
    sizes = {"experts": experts, "top_k": given["top_k"], "groups": given.get("groups", 1)}
    return Sizes({"tokens": tokens}, sizes, stored(given["logits"]), stored(given["logits"]))


def _attention(given: Given) -> Sizes:
    tokens, heads, dim = given["q"].shape
    sizes = {"heads": heads, "kv_heads": given["k_pages"].shape[2], "head_dim": dim}
    if given.get("window", 0):
        sizes["window"] = given["window"]
    return Sizes(_step(given, tokens), sizes, stored(given["k_pages"]), stored(given["q"]))


def _prologue(given: Given) -> Sizes:
    sizes = {name: given[name] for name in ("heads", "kv_heads", "head_dim")} | {
        "gated": int(given.get("gated", False))
    }
    qkv = given["qkv"]
    return Sizes({"tokens": qkv.shape[0]}, sizes, stored(given["k_pages"]), stored(qkv))


def _write_kv(given: Given) -> Sizes:
    k = given["k"]
    sizes = {"heads": k.shape[1], "columns": k.shape[2]}
    return Sizes({"tokens": k.shape[0]}, sizes, stored(given["k_pages"]), stored(k))


def _gated_delta(given: Given) -> Sizes:
    sizes = {name: given[name] for name in ("key_heads", "value_heads", "key_dim", "value_dim")}
    mixed = given["mixed"]
    return Sizes(_step(given, mixed.shape[0]), sizes, stored(given["state_pool"]), stored(mixed))


def _delta_rule(given: Given) -> Sizes:
    _, heads, value_dim, key_dim = given["pool"].shape
    sizes = {"key_heads": given["k"].shape[1], "heads": heads, "value_dim": value_dim, "key_dim": key_dim}
    return Sizes(_step(given, given["v"].shape[0]), sizes, stored(given["pool"]), stored(given["v"]))


def _channel_delta(given: Given) -> Sizes:
    return replace(_plain(given), format=stored(given["state_pool"]))


def _channel_delta_rule(given: Given) -> Sizes:
    return replace(_plain(given), format=stored(given["pool"]))


def _rope_angles(given: Given) -> Sizes:
    frequencies = given["inv_freq"]
    sizes = {"columns": 2 * frequencies.shape[0], "axes": given["positions"].dim()}
    return Sizes({"tokens": given["positions"].shape[-1]}, sizes, stored(frequencies), stored(frequencies))


def _embedding(given: Given) -> Sizes:
    weight = given["weight"]
    return Sizes({"tokens": given["ids"].shape[0]}, {"columns": weight.shape[1]}, stored(weight), stored(weight))


def _gather(given: Given) -> Sizes:
    x = given["x"]
    return Sizes({"tokens": given["rows"].shape[0]}, {"columns": x.shape[1]}, stored(x), stored(x))


def _sample(given: Given) -> Sizes:
    rows, vocabulary = given["logits"].shape
    sizes = {
        "columns": vocabulary,
        **{name: int(given.get(name, name == "filtered")) for name in ("greedy", "filtered")},
    }
    return Sizes({"tokens": rows}, sizes, stored(given["logits"]), stored(given["logits"]))


READERS: dict[str, Callable[[Given], Sizes]] = {
    "linear": _linear,
    "experts": _experts,
    "clamped_experts": _experts,
    "moe": _moe,
    "route": _route,
    "attention": _attention,
    "attention_prologue": _prologue,
    "write_kv": _write_kv,
    "gated_delta": _gated_delta,
    "gated_delta_rule": _delta_rule,
    "channel_delta": _channel_delta,
    "channel_delta_rule": _channel_delta_rule,
    "rope_angles": _rope_angles,
    "embedding": _embedding,
    "gather_rows": _gather,
    "sample": _sample,
}
