"""Kernels of `triton_split`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
MOST_PARTS = 256
"""Parts of a row: what the second launch looks through at once."""


@triton.jit
def mix64(x):
    """`noise.mix64` on uint64."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def mix32(x):
    """`noise.mix32` on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(seed, position, token):
    """`noise.gumbel` for one row: token is an int32 tensor."""
    key = mix64(mix64(seed.to(tl.uint64)) + position.to(tl.uint64))
    h = mix32(token.to(tl.uint32) + key.to(tl.uint32))
    h = mix32(h ^ (key >> 32).to(tl.uint32))
    u = ((h & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    u = tl.minimum(u, 1 - 2.0**-24)
    # log(1 - u) loses small u to rounding; dividing by the u that 1 - u stands for gives it back.
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, tl.log(rest) * (u / (rest - 1.0)))
    return -tl.log(exponential)


@triton.jit
def largest_of_part(
    logits_ptr, temperature_ptr, seed_ptr, position_ptr, value_ptr, token_ptr, V, logits_stride_n, part_size,
    BLOCK_V: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """value, token [N, parts]: the largest of each part of each row, the lowest token of equals."""
    i_n, i_part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + i_n).to(tl.float32)
        seed, position = tl.load(seed_ptr + i_n), tl.load(position_ptr + i_n)
    best = float("-inf")
    token = V
    for i_v in range(i_part * part_size, min(V, (i_part + 1) * part_size), BLOCK_V):
        o_v = i_v + tl.arange(0, BLOCK_V)
        m_v = o_v < V
        b_z = tl.load(logits_ptr + i_n * logits_stride_n + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
        if not GREEDY:
            b_z = b_z / tl.where(temperature > 0, temperature, 1.0)
            b_z = tl.where(temperature > 0, b_z + gumbel(seed, position, o_v), b_z)
        largest = tl.max(b_z, axis=0)
        first = tl.min(tl.where((b_z == largest) & m_v, o_v, V), axis=0)
        better = (largest > best) | (token == V)
        best, token = tl.where(better, largest, best), tl.where(better, first, token)
    tl.store(value_ptr + i_n * parts + i_part, best)
    tl.store(token_ptr + i_n * parts + i_part, token)


@triton.jit
def largest_of_parts(value_ptr, token_ptr, out_ptr, parts, V, BLOCK: tl.constexpr):
    """out [N]: the token of the largest part, the lowest of equals."""
    i_n = tl.program_id(0).to(tl.int64)
    o_part = tl.arange(0, BLOCK)
    mask = o_part < parts
    b_value = tl.load(value_ptr + i_n * parts + o_part, mask=mask, other=float("-inf"))
    b_token = tl.load(token_ptr + i_n * parts + o_part, mask=mask, other=V)
    token = tl.min(tl.where(b_value == tl.max(b_value, axis=0), b_token, V), axis=0)
    tl.store(out_ptr + i_n, tl.minimum(token, V - 1).to(tl.int64))  # a row of NaN has no largest: its last token


def sample(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, greedy: bool) -> Tensor:
    """logits [N, V], columns adjacent -> [N] int64."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    # About a thousand programs in all: enough for every multiprocessor, few enough to look through.
    parts = min(max(1, 1024 // max(rows, 1)), MOST_PARTS, triton.cdiv(vocabulary, BLOCK))
    part_size = triton.cdiv(triton.cdiv(vocabulary, parts), BLOCK) * BLOCK
    parts = triton.cdiv(vocabulary, part_size)
    value = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    token = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    if rows:
        largest_of_part[(rows, parts)](
            logits, temperature, seed, position, value, token, vocabulary, logits.stride(0), part_size,
            BLOCK_V=BLOCK, GREEDY=greedy,
        )  # fmt: skip
        largest_of_parts[(rows,)](value, token, out, parts, vocabulary, BLOCK=triton.next_power_of_2(parts))
    return out
