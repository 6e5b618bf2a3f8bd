"""GGUF tensor names in Hugging Face's words, and what undoes the converters' rearrangements.

llama      rows of q and k: each head's rotary halves are interleaved in the file (0, h/2, 1, h/2 + 1, ...)
*moe       all experts of a layer are one tensor [experts, out, in]; here each expert has its own
qwen35*    value heads of the linear attention are tiled over key heads (k0v0, k1v0, ..., k0v1, ...) where the
           published order is grouped (k0v0, k0v1, ..., k1v0, ...); norms hold 1 + w, ssm_a holds -exp(A_log),
           and the convolution lacks its middle dimension
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.errors import CheckpointError, quoted
from firstlight.weights.gguf_config import ROPE_FACTORS
from firstlight.weights.gguf_file import GgufEntry

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
LINEAR_ATTENTION = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
POST_NORM = {"ffn_norm": "post_attention_layernorm"}

BLOCK_NAMES: dict[str, dict[str, str]] = {
    "llama": ATTENTION | DENSE | POST_NORM,
    "qwen3": ATTENTION | DENSE | POST_NORM | QK_NORMS,
    "qwen3moe": ATTENTION | POST_NORM | QK_NORMS | {"ffn_gate_inp": "mlp.gate"},
    "qwen35": ATTENTION | DENSE | QK_NORMS | LINEAR_ATTENTION | {"post_attention_norm": "post_attention_layernorm"},
    "qwen35moe": ATTENTION
    | SHARED_EXPERT
    | QK_NORMS
    | LINEAR_ATTENTION
    | {"post_attention_norm": "post_attention_layernorm"},
}

BLOCK_PATTERN = re.compile(r"blk\.(\d{1,6})\.([a-z0-9_]+)(?:\.(weight|bias))?")


@dataclass(frozen=True)
class Arrangement:
    """What turns a tensor of the file into the published one.

    shape: the published shape if it isn't the file's (a dimension of 1 put back). rows, columns: for each index along
    the first or last dimension, the file's index. values: a change of the values themselves.
    """

    shape: tuple[int, ...] | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    values: Callable[[Tensor], Tensor] | None = None


def published_tensors(
    entry: GgufEntry, config: dict[str, Any], path: Path
) -> Iterator[tuple[str, GgufEntry, Arrangement]]:
    """(published name, where its values lie, what rearranges them) for each tensor that a tensor of the file stands for.

    Most stand for one; a stack of experts for many; rotary factors (they are in `config`) and the blocks of
    multi-token prediction for none. Raises CheckpointError if the name is unknown.
    """
    if entry.name == ROPE_FACTORS:
        return
    base, _, kind = entry.name.rpartition(".")
    if base in TOP_NAMES and kind in ("weight", "bias"):
        yield f"{TOP_NAMES[base]}.{kind}", entry, _arrangement(TOP_NAMES[base], entry, config)
        return
    architecture = config["gguf_architecture"]
    match = BLOCK_PATTERN.fullmatch(entry.name)
    if match is None:
        raise CheckpointError(f"{path}: tensor {quoted(entry.name)} is not known in a GGUF file of {architecture}")
    layer, base, kind = int(match[1]), match[2], match[3]
    if layer >= config["num_hidden_layers"] and architecture.startswith("qwen35"):
        return
    prefix = f"model.layers.{layer}."
    if base in EXPERTS and kind == "weight" and "num_experts" in config:
        for expert, part in _experts(entry, config["num_experts"], path):
            yield f"{prefix}mlp.experts.{expert}.{EXPERTS[base]}.weight", part, Arrangement()
    elif base in ("ssm_a", "ssm_dt") and architecture.startswith("qwen35"):
        name = "linear_attn.A_log" if base == "ssm_a" else "linear_attn.dt_bias"
        yield prefix + name, entry, _arrangement(name, entry, config)
    elif base in BLOCK_NAMES[architecture] and kind is not None:
        name = BLOCK_NAMES[architecture][base]
        yield f"{prefix}{name}.{kind}", entry, _arrangement(name, entry, config)
    else:
        raise CheckpointError(f"{path}: tensor {quoted(entry.name)} is not known in a GGUF file of {architecture}")


def _experts(entry: GgufEntry, count: int, path: Path) -> Iterator[tuple[int, GgufEntry]]:
    if len(entry.shape) != 3 or entry.shape[0] != count:
        raise CheckpointError(
            f"{path}: tensor {quoted(entry.name)} of shape {list(entry.shape)} should hold {count} experts' matrices"
        )
    nbytes = entry.nbytes // count
    for expert in range(count):
        yield (
            expert,
            GgufEntry(entry.name, entry.ggml_type, entry.shape[1:], entry.start + expert * nbytes, nbytes),
        )


def _arrangement(name: str, entry: GgufEntry, config: dict[str, Any]) -> Arrangement:
    """What turns a tensor of the file into the published tensor `name` (without layer and kind)."""
    if config["gguf_architecture"] == "llama" and name in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads" if name.endswith("q_proj") else "num_key_value_heads"]
        return Arrangement(rows=_fits(rotary_halves(entry.shape[0], heads), entry))
    if not config["gguf_architecture"].startswith("qwen35"):
        return Arrangement()
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    head_dim = config["linear_value_head_dim"]
    if name.endswith("norm") and name != "linear_attn.norm":
        return Arrangement(values=_minus_one)
    if name == "linear_attn.A_log":
        return Arrangement(rows=_grouped(entry, key_heads, value_heads), values=_log_of_negative)
    if name in ("linear_attn.dt_bias", "linear_attn.in_proj_a", "linear_attn.in_proj_b"):
        return Arrangement(rows=_grouped(entry, key_heads, value_heads))
    if name == "linear_attn.in_proj_z":
        return Arrangement(rows=_grouped(entry, key_heads, value_heads, head_dim))
    if name in ("linear_attn.in_proj_qkv", "linear_attn.conv1d"):
        queries_and_keys = 2 * key_heads * config["linear_key_head_dim"]
        shape = (entry.shape[0], 1, entry.shape[-1]) if name.endswith("conv1d") else None
        return Arrangement(shape=shape, rows=_grouped(entry, key_heads, value_heads, head_dim, first=queries_and_keys))
    if name == "linear_attn.out_proj":
        return Arrangement(columns=_grouped(entry, key_heads, value_heads, head_dim, dimension=-1))
    if name == "mlp.shared_expert_gate":
        return Arrangement(shape=(1, entry.shape[-1]))
    return Arrangement()


def _grouped(
    entry: GgufEntry, key_heads: int, value_heads: int, head_dim: int = 1, *, first: int = 0, dimension: int = 0
) -> Tensor | None:
    """The order that groups value heads after `first` rows (or columns); None where `_fits` has it."""
    if entry.shape[dimension] != first + value_heads * head_dim:  # before anything is made of sizes that a file claims
        return None
    heads = grouped_heads(key_heads, value_heads, head_dim) + first
    return _fits(torch.cat((torch.arange(first), heads)), entry, dimension)


def _fits(order: Tensor, entry: GgufEntry, dimension: int = 0) -> Tensor | None:
    """The order if it has the tensor's size; None (the loader reports the shape then) or if it changes nothing."""
    if order.numel() != entry.shape[dimension] or torch.equal(order, torch.arange(order.numel())):
        return None
    return order


def rotary_halves(rows: int, heads: int) -> Tensor:
    """For each row of q or k, the row of a llama GGUF file that holds it: int64 [rows].

    A published head's rows are two halves, and rotary position i turns rows i and i + head_dim / 2; the file has the
    two side by side, at 2 i and 2 i + 1. Empty if `rows` isn't `heads` times an even number.
    """
    if rows % (2 * heads):
        return torch.empty(0, dtype=torch.int64)
    return torch.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


def grouped_heads(key_heads: int, value_heads: int, head_dim: int = 1) -> Tensor:
    """For each value row in published (grouped) order, its index in a file's tiled order: int64 [value_heads * dim].

    Empty if the value heads can't be divided over the key heads.
    """
    if value_heads % key_heads:
        return torch.empty(0, dtype=torch.int64)
    rows = torch.arange(value_heads * head_dim)
    return rows.reshape(value_heads // key_heads, key_heads, head_dim).transpose(0, 1).flatten()


def _minus_one(values: Tensor) -> Tensor:
    return (values.float() - 1).to(values.dtype)


def _log_of_negative(values: Tensor) -> Tensor:
    return torch.log(-values.float()).to(values.dtype)
