"""The kernels as providers: each `run` has the signature of its op, each `when` says why it can't serve a call.

Tensors are handed to the kernels as addresses, so what an address doesn't say is checked here, or once at binding by
`when`: dtypes there; shapes and strides that may differ from call to call here.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from firstlight.hardware import Hardware
from firstlight.ops.cpu_native import build
from firstlight.ops.cpu_native.layout import KINDS
from firstlight.ops.op import Call
from firstlight.parallel import Group
from firstlight.quant import Packed

BF16 = torch.bfloat16
MOST_GROUPED_HEADS = 16
"""Query heads that share a KV head: what the attention kernel keeps on its stack."""

NEEDED_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512dq")

kernels: ModuleType
"""The compiled module, once `unavailable` has found that there is one."""


def unavailable(hardware: Hardware) -> str | None:
    """Why the kernels can't be used on this hardware; compiles them, once a process, if they can."""
    global kernels
    if hardware.kind != "cpu":
        return f"these are kernels for CPUs, and this is {hardware.name}"
    for feature in NEEDED_FEATURES:
        if not hardware.has(feature):
            return f"{hardware.name} has no {feature}"
    found = build.attempt()
    if isinstance(found, str):
        return found
    kernels = found
    return None


def not_bf16(**tensors: Tensor | None) -> str | None:
    """Names the first of the tensors that isn't bfloat16."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != BF16:
            return f"{name} is {tensor.dtype}, and these kernels compute in bfloat16"
    return None


def address(tensor: Tensor | None) -> int:
    """Where a tensor's first element is; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy if neighbouring elements of its last dimension aren't neighbours in memory."""
    return tensor if tensor.is_contiguous() or tensor.stride(-1) == 1 else tensor.contiguous()


WeightArguments = tuple[int, int, int, int, int, int, int, int, int]


def weight_arguments(weight: Packed) -> WeightArguments:
    """What a kernel is told of a weight: data, scale, minimum, rows, columns, bits, zero, group, wide scales."""
    parts, (rows, columns) = weight.parts, weight.shape
    kind = KINDS.get(weight.format.dtype)
    if kind is None:
        return parts["data"].data_ptr(), 0, 0, rows, columns, 16, 0, 0, 0
    minimum = address(parts.get("minimum"))
    scale = parts["scale"].data_ptr()
    return parts["data"].data_ptr(), scale, minimum, rows, columns, kind.bits, kind.zero, kind.group, kind.wide_scale


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Op `linear`. Quantised weights: integers are multiplied exactly for up to 16 rows, not rounded to bfloat16 first."""
    rows, columns = x.shape
    if columns != weight.shape[1]:
        raise ValueError(f"linear: x has {columns} columns, the weight {weight.shape[1]}")
    x = rows_of(x)
    outputs = weight.shape[0]
    output = x.new_empty((rows, outputs)) if dtype is None else x.new_empty((rows, outputs), dtype=dtype)
    kernels.linear(
        *weight_arguments(weight),
        x.data_ptr(), x.stride(0), rows,
        output.data_ptr(), outputs, dtype is torch.float32, 0 if bias is None else bias.data_ptr(),
    )  # fmt: skip
    return output


def linear_when(call: Call) -> str | None:
    """bfloat16 activations, bias and result (or float32), and a tiled weight."""
    x = call.args[0]
    if isinstance(x, Packed):
        return f"the activations are {x.format}"
    bias = call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")
    if call.kwargs.get("dtype") not in (None, BF16, torch.float32):
        return f"the result is to be {call.kwargs['dtype']}"
    return not_bf16(x=x, bias=bias) or unavailable(call.hardware)


def embedding(ids: Tensor, weight: Packed, *, start: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Op `embedding`."""
    ids = ids.to(torch.int64).contiguous()
    output = torch.empty((ids.shape[0], weight.shape[1]), dtype=BF16)
    kernels.embedding(*weight_arguments(weight), ids.data_ptr(), ids.shape[0], start, output.data_ptr())
    return output


def embedding_when(call: Call) -> str | None:
    """A tiled weight, looked up in bfloat16."""
    weight, wanted = call.args[1], call.kwargs.get("dtype")
    if (wanted or weight.dtype) != BF16:
        return f"the result is to be {wanted or weight.dtype}, and these kernels compute in bfloat16"
    return unavailable(call.hardware)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centred: bool = False) -> Tensor:
    """Op `rms_norm`."""
    shape, size = x.shape, x.shape[-1]
    x = rows_of(x)
    if x.dim() == 3:
        rows, heads, (row_stride, head_stride) = x.shape[0], x.shape[1], x.stride()[:2]
    else:
        x = x if x.dim() == 2 else x.reshape(-1, size)
        rows, heads, row_stride, head_stride = x.shape[0], 1, x.stride(0), 0
    output = x.new_empty(shape)
    kernels.rms_norm(
        x.data_ptr(), row_stride, head_stride,
        output.data_ptr(), heads * size, size,
        weight.data_ptr(), rows, heads, size, eps, zero_centred,
    )  # fmt: skip
    return output


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, zero_centred: bool = False, group: Group | None = None
) -> tuple[Tensor, Tensor]:
    """Op `add_rms_norm`, on one rank."""
    rows, size = x.shape
    x, residual = rows_of(x), rows_of(residual)
    if residual.shape != x.shape:
        raise ValueError(f"add_rms_norm: x is {tuple(x.shape)}, residual {tuple(residual.shape)}")
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(output)
    kernels.add_rms_norm(
        x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0),
        total.data_ptr(), output.data_ptr(), weight.data_ptr(), rows, size, eps, zero_centred,
    )  # fmt: skip
    return output, total


def norm_when(call: Call) -> str | None:
    """For `rms_norm` and `add_rms_norm`: every tensor bfloat16, and nothing to reduce."""
    group = call.kwargs.get("group")
    if group is not None and group.size > 1:
        return "the sum over ranks isn't part of this kernel"
    tensors = dict(zip(("x", "residual", "weight") if len(call.args) == 3 else ("x", "weight"), call.args, strict=True))
    return not_bf16(**tensors) or unavailable(call.hardware)


def silu_mul(x: Tensor) -> Tensor:
    """Op `silu_mul`."""
    rows, size = x.shape[0], x.shape[1] // 2
    x = rows_of(x)
    output = x.new_empty((rows, size))
    kernels.silu_mul(x.data_ptr(), x.stride(0), output.data_ptr(), rows, size)
    return output


def silu_when(call: Call) -> str | None:
    """bfloat16 rows."""
    if call.args[0].dim() != 2:
        return f"x has {call.args[0].dim()} dimensions, the kernel takes 2"
    return not_bf16(x=call.args[0]) or unavailable(call.hardware)


def attention_prologue(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    angles: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool = False,
    eps: float = 1e-6,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Op `attention_prologue`."""
    tokens, columns = qkv.shape
    expected = head_dim * (heads * (1 + gated) + 2 * kv_heads)
    if columns != expected:
        raise ValueError(f"attention_prologue: qkv has {columns} columns, but q | k | v take {expected}")
    qkv, angles = rows_of(qkv), rows_of(angles)
    if slot.dtype != torch.int64 or not slot.is_contiguous():
        slot = slot.to(torch.int64).contiguous()
    query = qkv.new_empty((tokens, heads, head_dim))
    gate = qkv.new_empty((tokens, heads * head_dim)) if gated else None
    kernels.attention_prologue(
        qkv.data_ptr(), qkv.stride(0), query.data_ptr(), address(gate), address(q_norm), address(k_norm),
        angles.data_ptr(), angles.stride(0), angles.shape[1] // 2,
        k_pages.data_ptr(), *k_pages.stride()[:3], v_pages.data_ptr(), *v_pages.stride()[:3],
        slot.data_ptr(), k_pages.shape[1], tokens, heads, kv_heads, head_dim, eps, zero_centred,
    )  # fmt: skip
    return query, gate


def prologue_when(call: Call) -> str | None:
    """bfloat16 throughout, but for angles in float32."""
    qkv, q_norm, k_norm, angles, k_pages, v_pages, _ = call.args
    if angles.dtype != torch.float32:
        return f"angles are {angles.dtype}, and the kernel reads float32"
    reason = not_bf16(qkv=qkv, q_norm=q_norm, k_norm=k_norm, k_pages=k_pages, v_pages=v_pages)
    return reason or unavailable(call.hardware)


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    row: Tensor,
    query_start: Tensor,
    length: Tensor,
    *,
    scale: float,
    max_query: int,
    max_context: int,
    causal: bool = True,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Op `attention`. Probabilities stay in float32."""
    _, heads, size = q.shape
    q, pages = rows_of(q), rows_of(pages)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _, page_size, kv_heads, _ = k_pages.shape
    kernels.attend(
        q.data_ptr(), *q.stride()[:2], out.data_ptr(), *out.stride()[:2],
        k_pages.data_ptr(), *k_pages.stride()[:3], v_pages.data_ptr(), *v_pages.stride()[:3],
        pages.data_ptr(), pages.stride(0), pages.shape[1],
        row.data_ptr(), query_start.data_ptr(), length.data_ptr(), length.shape[0],
        heads, kv_heads, size, page_size, window, causal, scale,
    )  # fmt: skip
    return out


def attention_when(call: Call) -> str | None:
    """bfloat16 pages and int32 indices, no sinks, as many value as key dimensions."""
    q, k_pages, v_pages, pages, row, query_start, length = call.args
    for name, tensor in (("pages", pages), ("row", row), ("query_start", query_start), ("length", length)):
        if tensor.dtype != torch.int32:
            return f"{name} is {tensor.dtype}, and the kernel reads int32"
    if call.kwargs.get("sinks") is not None:
        return "this kernel knows no sinks"
    if k_pages.shape[3] != v_pages.shape[3]:
        return f"keys have {k_pages.shape[3]} dimensions, values {v_pages.shape[3]}"
    if q.shape[1] > MOST_GROUPED_HEADS * k_pages.shape[2]:
        return f"{q.shape[1] // k_pages.shape[2]} query heads share a KV head; the kernel holds {MOST_GROUPED_HEADS}"
    return not_bf16(q=q, k_pages=k_pages, v_pages=v_pages) or unavailable(call.hardware)
