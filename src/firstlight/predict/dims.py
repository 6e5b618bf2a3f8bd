"""The static sizes of a call: what the efficiency of its kernel depends on, besides the step's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from firstlight.ops.op import Op
from firstlight.quant import Packed, dtype_name


@dataclass(frozen=True, slots=True)
class Dims:
    """sizes: by name, as calibration tables name them. format: of the weight or of cache rows. limit: keys a token sees."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    format: str = ""
    limit: int = 0
    block_scaled: bool = False


@cache
def _names(op: Op) -> tuple[str, ...]:
    return tuple(op.signature.parameters)


def dims_of(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Dims:
    """Dims of a call on meta tensors; empty for ops that are bound by bytes alone."""
    given = {**dict(zip(_names(op), args, strict=False)), **kwargs}
    reader = _READERS.get(op.name)
    return reader(given) if reader else Dims()


def _format(value: Any) -> str:
    return value.format.dtype if isinstance(value, Packed) else dtype_name(value.dtype)


def _scaled(value: Any) -> bool:
    return isinstance(value, Packed) and value.format.block is not None


def _linear(given: Mapping[str, Any]) -> Dims:
    weight = given["weight"]
    return Dims({"rows": weight.shape[0], "columns": weight.shape[1]}, _format(weight), block_scaled=_scaled(weight))


def _experts(given: Mapping[str, Any]) -> Dims:
    gate_up = given["gate_up"]
    held, twice, hidden = gate_up.shape
    sizes = {"experts": held, "top_k": given["experts"].shape[1], "hidden": hidden, "intermediate": twice // 2}
    return Dims(sizes, _format(gate_up), block_scaled=_scaled(gate_up))


def _attention(given: Mapping[str, Any]) -> Dims:
    heads, dim = given["q"].shape[1:]
    sizes = {"heads": heads, "kv_heads": given["k_pages"].shape[2], "head_dim": dim}
    return Dims(sizes, _format(given["k_pages"]), limit=given.get("window", 0))


def _latent_attention(given: Mapping[str, Any]) -> Dims:
    weight, latent = given["kv_b"], given["latent_pages"]
    selected = given.get("selected")
    sizes = {"heads": given["q"].shape[1], "rows": weight.shape[0], "columns": weight.shape[1]}
    limit = 0 if selected is None else selected.shape[1]
    return Dims(sizes, _format(latent), limit=limit, block_scaled=_scaled(weight))


def _delta_rule(given: Mapping[str, Any]) -> Dims:
    _, heads, value_dim, key_dim = given["pool"].shape
    return Dims({"heads": heads, "value_dim": value_dim, "key_dim": key_dim}, _format(given["pool"]))


def _collective(given: Mapping[str, Any]) -> Dims:
    return Dims({"ranks": given["group"].size}, _format(given["x"]))


_READERS = {
    "linear": _linear,
    "experts": _experts,
    "clamped_experts": _experts,
    "attention": _attention,
    "latent_attention": _latent_attention,
    "gated_delta_rule": _delta_rule,
    "channel_delta_rule": _delta_rule,
    "all_reduce": _collective,
    "all_gather": _collective,
}
