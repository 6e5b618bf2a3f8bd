"""Decode: convolution window, gates and key and query norms in one kernel, recurrence and gated norm in another.

The first does what comes before the recurrence, once for each head. In the second the state's bytes decide: a program of one
warp takes a few rows of a head's state, asks for them at once, and many such programs share a multiprocessor. On NVIDIA it
starts while the first kernel runs and has then asked for its state before it needs that kernel's results (programmatic dependent
launch); states are what the first kernel doesn't write. The gated norm needs all of a head's values. While programs are few, the
last one of a head does it: they draw tickets. With many, waiting for tickets costs more than a third kernel.

A slot that one request writes may not be read by another in the same step; programs run in no order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import cannot_emit, power_of_two, register_limit, unavailable
from firstlight.quant import Emission, Weight, empty_result

FEW_HEADS = 132
"""Up to here (value heads of all requests) a head's last program applies the norm."""
LARGEST_STATE = 2**16
"""Elements of a head's state."""
STATE_DTYPES = (torch.float32, torch.bfloat16)
"""Of states in the pool; those in bfloat16 are widened as they are read, and rounded once, as they are written."""


def when(call: Call) -> str | None:
    """Decode steps that keep plain states, with heads whose sizes are powers of two."""
    if reason := unavailable(call.hardware):
        return reason
    if call.kwargs["max_query"] != 1:
        return "serves steps with one token a request"
    if call.kwargs.get("log") is not None or call.args[12].dim() != 1:
        return "writes the state after the step only"
    return unsupported(call) or cannot_emit(call, call.kwargs["value_dim"])


def unsupported(call: Call) -> str | None:
    """Why the shapes or dtypes of a call don't fit the Triton kernels, or None."""
    key_dim, value_dim = call.kwargs["key_dim"], call.kwargs["value_dim"]
    state = call.args[9]
    if call.dtype not in (torch.bfloat16, torch.float16, torch.float32) or state.dtype not in STATE_DTYPES:
        return f"computes in float32 from 16 or 32 bits, not with {call.dtype} inputs and {state.dtype} states"
    if key_dim & (key_dim - 1) or value_dim & (value_dim - 1) or min(key_dim, value_dim) < 8:
        return f"heads of {key_dim} keys and {value_dim} values: both have to be powers of two, 8 or more"
    if key_dim * value_dim > LARGEST_STATE:
        return f"a state of {value_dim} x {key_dim} is larger than what these kernels have been tried with"
    return None


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a state is cut: programs of `warps` take `rows` of a head's values each.

    norm: whether the last program of a head applies the gated norm, rather than a kernel of its own. registers: cap for a
    thread, 0 for none. dependent: whether a kernel starts before the one before it has ended. prepare_warps: of the first kernel.
    """

    rows: int
    warps: int
    norm: bool
    registers: int = 0
    dependent: bool = False
    prepare_warps: int = 2


def choose_tiles(heads: int, value_dim: int, key_dim: int, dependent: bool) -> Tiles:
    """Tiles of 4 KiB for a warp; heads: value heads of all requests."""
    return Tiles(min(value_dim, max(1, 1024 // key_dim)), 1, heads <= FEW_HEADS, 64, dependent)


def workspace(call: Call) -> int:
    """q, k, v and gates of the step, between the kernels, and raw outputs: bytes."""
    mixed, requests, heads = call.args[0], call.args[11].shape[0], call.kwargs["value_heads"]
    return raw_bytes(call) + requests * (mixed.shape[1] * mixed.element_size() + heads * 2 * 4)


def raw_bytes(call: Call) -> int:
    """Of outputs before the gated norm, if that isn't written in their place."""
    emit = call.kwargs.get("emit")
    return 0 if emit is None or emit.plain else int(call.args[1].numel() * call.args[0].element_size())


def run(
    mixed: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    query_start: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    exports: Tensor,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    eps: float,
    max_query: int,
    log: None = None,
    log_length: Tensor | None = None,
    emit: Emission | None = None,
    tiles: Tiles | None = None,
) -> Weight:
    """The contract of `gated_delta` for one token (or none) a request. tiles: instead of `choose_tiles`."""
    from firstlight.ops.gated_delta import triton_decode_kernel as kernels
    from firstlight.ops.gated_delta.triton_chunked_kernels import gate_outputs, gated_result
    from firstlight.ops.linear.triton_quantise import packed_arguments, plain_part
    from firstlight.ops.triton_launch import dependent_launch

    check_strides(mixed, z, a, b, state_pool)
    out = torch.empty(z.shape, dtype=mixed.dtype, device=mixed.device)
    requests = state_in.shape[0]
    if requests == 0 or mixed.shape[0] == 0:
        return empty_result(mixed, z.shape, emit)
    if tiles is None:
        dependent = bool(dependent_launch(mixed)["PDL"])
        tiles = choose_tiles(requests * value_heads, value_dim, key_dim, dependent)
    promoted = torch.promote_types(mixed.dtype, norm_weight.dtype)
    round_product = promoted == mixed.dtype and promoted.itemsize == 2
    width = conv_weight.shape[1]
    sizes = {"HK": key_heads, "HV": value_heads, "K": key_dim, "V": value_dim}
    indices = (query_start, state_in, state_out, exports)
    conv_strides = (*conv_weight.stride(), *conv_pool.stride())
    launch = {"launch_pdl": True} if tiles.dependent else {}
    exported: dict[str, Any] = {
        "HAS_EXPORTS": exports.shape[0] > 0,
        "BLOCK_E": power_of_two(max(exports.shape[0], 1)),
    }
    columns = torch.empty((requests, mixed.shape[1]), dtype=mixed.dtype, device=mixed.device)
    gates = torch.empty((requests, value_heads, 2), dtype=torch.float32, device=mixed.device)
    kernels.prepare_kernel[(2 * key_heads + value_heads, requests)](
        mixed,
        a,
        b,
        conv_weight,
        A_log,
        dt_bias,
        conv_pool,
        *indices,
        columns,
        gates,
        exports.shape[0],
        mixed.shape[0],
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        *conv_strides,
        **sizes,
        W=width,
        num_warps=tiles.prepare_warps,
        **exported,
        PDL=tiles.dependent,
        **launch,
    )
    result = gated_result(out, emit)
    kernels.streaming_kernel[(value_heads * (value_dim // tiles.rows), requests)](
        columns,
        gates,
        z,
        norm_weight,
        state_pool,
        *indices,
        tickets(mixed.device, requests * value_heads),
        out,
        plain_part(result),
        eps=eps,
        exports_count=exports.shape[0],
        z_stride_t=z.stride(0),
        state_stride_slot=state_pool.stride(0),
        **packed_arguments(result),
        **sizes,
        BLOCK_V=tiles.rows,
        ROUND_PRODUCT=round_product,
        NORM=tiles.norm,
        num_warps=tiles.warps,
        **register_limit(tiles.registers),
        **exported,
        PDL=tiles.dependent,
        **launch,
    )
    if not tiles.norm:
        gate_outputs(out, z, norm_weight, eps, result, value_heads, 8, round_product, PDL=tiles.dependent, **launch)
    return result


def check_strides(mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, state_pool: Tensor) -> None:
    """Raise ValueError for tensors whose rows aren't dense."""
    for name, tensor in (("mixed", mixed), ("z", z), ("a", a), ("b", b)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"gated_delta: rows of {name} must be dense, but its strides are {tensor.stride()}")
    if not state_pool[0].is_contiguous():
        raise ValueError(
            f"gated_delta: states must be dense [HV, V, K], but the pool's strides are {state_pool.stride()}"
        )


_TICKETS: dict[tuple[torch.device, int], list[Tensor]] = {}
"""Smaller ones are kept: captured graphs go on using them."""


def tickets(device: torch.device, count: int) -> Tensor:
    """Zeros [count] of a stream, which kernels count up and leave as zeros again."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held = _TICKETS.setdefault((device, stream), [])
    if not held or held[-1].shape[0] < count:
        held.append(torch.zeros(max(count, 1 << 14), dtype=torch.int32, device=device))
    return held[-1]
