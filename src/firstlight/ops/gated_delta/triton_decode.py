"""Decode: convolution window, gates, key and query norms, recurrence and gated norm in one kernel, or in two.

In one, a program owns one value head of one request and holds its whole state, so that everything is asked for at once and
nobody waits for another kernel. Value heads that share a key head all read that head's part of the window, and in place the
window may change only after the last of them has: they draw tickets, and the last one writes.

With more programs than multiprocessors the state's bytes decide. A first kernel then does what comes before the recurrence,
once for each head, and in the second many lean programs share a multiprocessor, each with its state going by in tiles.

A slot that one request writes may not be read by another in the same step; programs run in no order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable

FEW_PROGRAMS = 132
"""Up to here each has a multiprocessor of its own (of an H200, at least)."""
LARGEST_STATE = 2**16
"""Elements of a head's state that one program can hold in registers."""


def when(call: Call) -> str | None:
    """Decode steps that keep plain float32 states, with heads whose sizes are powers of two."""
    if reason := unavailable(call.hardware):
        return reason
    if call.kwargs["max_query"] != 1:
        return "serves steps with one token a request"
    if call.kwargs.get("log") is not None or call.args[12].dim() != 1:
        return "writes the state after the step only"
    return unsupported(call)


def unsupported(call: Call) -> str | None:
    """Why the shapes or dtypes of a call don't fit the Triton kernels, or None."""
    key_dim, value_dim = call.kwargs["key_dim"], call.kwargs["value_dim"]
    state = call.args[9]
    if call.dtype not in (torch.bfloat16, torch.float16, torch.float32) or state.dtype != torch.float32:
        return f"computes in float32 from 16 or 32 bits, not with {call.dtype} inputs and {state.dtype} states"
    if key_dim & (key_dim - 1) or value_dim & (value_dim - 1) or min(key_dim, value_dim) < 8:
        return f"heads of {key_dim} keys and {value_dim} values: both have to be powers of two, 8 or more"
    if key_dim * value_dim > LARGEST_STATE:
        return f"a state of {value_dim} x {key_dim} doesn't fit one program's registers"
    return None


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a state is cut. fused: one kernel, which holds all of it; else `rows` at a time, fetched `stages` tiles ahead."""

    fused: bool
    warps: int
    rows: int = 0
    stages: int = 1


def choose_tiles(programs: int, value_dim: int, key_dim: int) -> Tiles:
    """One kernel while programs are few, tiles of 4 KiB where many share a multiprocessor."""
    if programs <= FEW_PROGRAMS:
        return Tiles(True, max(1, min(8, value_dim * key_dim // 1024)))
    return Tiles(False, 2, min(value_dim, max(1, 1024 // key_dim)), 4)


def workspace(call: Call) -> int:
    """q, k, v and gates of the step, between the two kernels: bytes."""
    mixed, requests = call.args[0], call.args[11].shape[0]
    heads = call.kwargs["value_heads"]
    return requests * (mixed.shape[1] * mixed.element_size() + heads * 8) if requests * heads > FEW_PROGRAMS else 0


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
    tiles: Tiles | None = None,
) -> Tensor:
    """The contract of `gated_delta` for one token (or none) a request. tiles: instead of `choose_tiles`."""
    from firstlight.ops.gated_delta import triton_decode_kernel as kernels

    check_strides(mixed, z, a, b, state_pool)
    out = torch.empty(z.shape, dtype=mixed.dtype, device=mixed.device)
    requests = state_in.shape[0]
    if requests == 0 or mixed.shape[0] == 0:
        return out
    if tiles is None:
        tiles = choose_tiles(requests * value_heads, value_dim, key_dim)
    promoted = torch.promote_types(mixed.dtype, norm_weight.dtype)
    round_product = promoted == mixed.dtype and promoted.itemsize == 2
    width = conv_weight.shape[1]
    sizes = {"HK": key_heads, "HV": value_heads, "K": key_dim, "V": value_dim}
    taps = {"W": width, "TAPS": 1 << (width - 1).bit_length()}
    indices = (query_start, state_in, state_out, exports)
    conv_strides = (*conv_weight.stride(), *conv_pool.stride())
    if tiles.fused:
        kernels.gated_delta_decode_kernel[(value_heads, requests)](
            mixed,
            z,
            a,
            b,
            conv_weight,
            A_log,
            dt_bias,
            norm_weight,
            conv_pool,
            state_pool,
            *indices,
            tickets(mixed.device, requests * key_heads),
            out,
            eps,
            exports.shape[0],
            mixed.shape[0],
            mixed.stride(0),
            z.stride(0),
            a.stride(0),
            b.stride(0),
            *conv_strides,
            state_pool.stride(0),
            **sizes,
            **taps,
            ROUND_PRODUCT=round_product,
            num_warps=tiles.warps,
        )
        return out
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
        **taps,
        num_warps=4,
    )
    kernels.recurrence_kernel[(value_heads, requests)](
        columns,
        gates,
        z,
        norm_weight,
        state_pool,
        *indices,
        out,
        eps,
        exports.shape[0],
        z.stride(0),
        state_pool.stride(0),
        **sizes,
        BLOCK_V=tiles.rows,
        STAGES=tiles.stages,
        ROUND_PRODUCT=round_product,
        num_warps=tiles.warps,
    )
    return out


def check_strides(mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, state_pool: Tensor) -> None:
    """Raise ValueError for tensors whose rows aren't dense."""
    for name, tensor in (("mixed", mixed), ("z", z), ("a", a), ("b", b)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"gated_delta: rows of {name} must be dense, but its strides are {tensor.stride()}")
    if not state_pool[0].is_contiguous():
        raise ValueError(
            f"gated_delta: states must be dense [HV, V, K], but the pool's strides are {state_pool.stride()}"
        )


_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


def tickets(device: torch.device, count: int) -> Tensor:
    """Zeros [count] of a stream, which kernels count up and leave as zeros again."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held = _TICKETS.get((device, stream))
    if held is None or held.shape[0] < count:
        held = torch.zeros(max(count, 1 << 14), dtype=torch.int32, device=device)
        _TICKETS[device, stream] = held
    return held
