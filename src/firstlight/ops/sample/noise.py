"""Gumbel noise from a counter hash: no generator, no state, the same integers on every device.

    key   = mix64(mix64(seed) + position), in 64-bit arithmetic; low and high are its halves
    h     = mix32(mix32(token + low) ^ high), in 32-bit arithmetic
    u     = ((h mod 2^31) + 1/2) / 2^31, in (0, 1)
    noise = -log(-log(1 - u))

mix64 is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, after adding its odd constant); mix32 one of Wellons's
low-bias 32-bit hashes (github.com/skeeto/hash-prospector). Large noise comes from small u, where float32 is densest: the
tokens that win are told apart to one part in 10^5 even in a vocabulary of a quarter of a million.
torch's integers are signed and wrap around; `>>` copies the sign, so the copies are masked away.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise [N, V], float32, for seed and position [N] and token ids [V] or [N, V], of any integers."""
    key = mix64(mix64(seed.long()) + position.long())
    h = mix32(token.to(torch.int32) + key.to(torch.int32)[:, None])  # the cast keeps the low 32 bits
    return gumbel_of(mix32(h.bitwise_xor_((key >> 32).to(torch.int32)[:, None])))


def gumbel_of(h: Tensor) -> Tensor:
    """The noise of hashes [...] int32, which are overwritten; finite for each of them."""
    u = h.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    # The largest u rounds to 1, whose noise would be -inf: as if the token couldn't be drawn.
    exponential = u.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def mix64(x: Tensor) -> Tensor:
    """A hash of int64 [N]; every bit of the input reaches every bit of the output."""
    x = x + _signed(0x9E3779B97F4A7C15, 64)
    x = (x ^ _shifted(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shifted(x, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shifted(x, 31, 64)


def mix32(x: Tensor) -> Tensor:
    """A hash of int32 [...], in place."""
    x.bitwise_xor_(_shifted(x, 16, 32)).mul_(_signed(0x7FEB352D, 32))
    x.bitwise_xor_(_shifted(x, 15, 32)).mul_(_signed(0x846CA68B, 32))
    return x.bitwise_xor_(_shifted(x, 16, 32))


def _shifted(x: Tensor, bits: int, width: int) -> Tensor:
    """x >> bits with zeros shifted in."""
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def _signed(value: int, width: int) -> int:
    """The signed integer with the bits of `value`."""
    return value - (1 << width) if value >> (width - 1) else value
