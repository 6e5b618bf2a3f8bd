"""Decode in one kernel: convolution window, gates, key and query norms, recurrence and gated norm.

A program owns one value head of one request, with its whole state, so nothing but the state goes through memory twice and
the norm over the head's values needs nobody else. Value heads that share a key head all read that head's part of the
window, and in place the window may change only after the last of them has: they draw tickets, and the last one writes.

A slot that one request writes may not be read by another in the same step; programs run in no order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.ops.op import Call
from firstlight.ops.triton_support import unavailable

FEW_PROGRAMS = 132
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
    """How a program goes through its state: so many rows at a time, fetched `stages` tiles ahead, by so many warps.

    registers: of a thread, at most; 0 leaves it to the compiler. (NVIDIA GPUs only.)
    """

    rows: int
    warps: int
    stages: int
    registers: int = 0


def choose_tiles(programs: int, value_dim: int, key_dim: int) -> Tiles:
    """All at once while programs are few; small tiles where many programs share a multiprocessor."""
    if programs <= FEW_PROGRAMS:
        return Tiles(value_dim, max(1, min(16, value_dim * key_dim // 1024)), 1)
    rows = min(value_dim, max(1, 2048 // key_dim))
    return Tiles(rows, 4, 3)


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
    from firstlight.ops.gated_delta.triton_decode_kernel import gated_delta_decode_kernel

    check_strides(mixed, z, a, b, state_pool)
    out = torch.empty(z.shape, dtype=mixed.dtype, device=mixed.device)
    requests = state_in.shape[0]
    if requests == 0 or mixed.shape[0] == 0:
        return out
    if tiles is None:
        tiles = choose_tiles(requests * value_heads, value_dim, key_dim)
    promoted = torch.promote_types(mixed.dtype, norm_weight.dtype)
    gated_delta_decode_kernel[(value_heads, requests)](
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
        query_start,
        state_in,
        state_out,
        exports,
        tickets(mixed.device, requests * key_heads),
        out,
        eps,
        exports.shape[0],
        mixed.shape[0],
        mixed.stride(0),
        z.stride(0),
        a.stride(0),
        b.stride(0),
        conv_weight.stride(0),
        conv_weight.stride(1),
        *conv_pool.stride(),
        state_pool.stride(0),
        HK=key_heads,
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_V=tiles.rows,
        STAGES=tiles.stages,
        W=conv_weight.shape[1],
        TAPS=1 << (conv_weight.shape[1] - 1).bit_length(),
        WHOLE=tiles.rows == value_dim,
        ROUND_PRODUCT=promoted == mixed.dtype and promoted.itemsize == 2,
        num_warps=tiles.warps,
        **({"maxnreg": tiles.registers} if tiles.registers and mixed.is_cuda and not torch.version.hip else {}),
    )
    return out


def check_strides(mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, state_pool: Tensor) -> None:
    """Raise ValueError for tensors whose rows aren't dense."""
    for name, tensor in (("mixed", mixed), ("z", z), ("a", a), ("b", b)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"gated_delta: rows of {name} must be dense, but its strides are {tensor.stride()}")
    if not state_pool[0].is_contiguous():
        raise ValueError(f"gated_delta: states must be dense [HV, V, K], but the pool's strides are {state_pool.stride()}")


_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


def tickets(device: torch.device, count: int) -> Tensor:
    """Zeros [count] of a stream, which kernels count up and leave as zeros again."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held = _TICKETS.get((device, stream))
    if held is None or held.shape[0] < count:
        held = torch.zeros(max(count, 1 << 14), dtype=torch.int32, device=device)
        _TICKETS[device, stream] = held
    return held
