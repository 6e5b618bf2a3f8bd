"""How much prefill a step may hold while others wait for their next tokens.

Tokens deep in a context cost more than the first ones: each attends to all before it. So what a step may take beside rows that
decode is bounded in FLOPs: those of `step_tokens` tokens at the start of a prompt, wherever in theirs the prompts are.
"""

from __future__ import annotations

import math

from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.plan import CHUNK


class Work:
    """What is left of a step's work, in FLOPs; infinite unless a step began `bounded`."""

    def __init__(self, geometry: CacheGeometry, step_tokens: int) -> None:
        self._token, self._pair = geometry.token_flops, geometry.pair_flops
        self._whole = self._of(0, step_tokens)
        self._left = math.inf

    def begin(self, bounded: bool) -> None:
        """A new step. bounded: somebody waits for its end."""
        self._left = self._whole if bounded else math.inf

    @property
    def is_done(self) -> bool:
        """Whether the step may take no more."""
        return self._left <= 0

    def fitting(self, start: int, count: int) -> int:
        """How many of `count` tokens from position `start` on the step may take: all; or a size that graphs are made for, 2^n or
        1.5 * 2^n; at least 64, so that every prompt gets on."""
        if math.isinf(self._left):
            return count
        each = self._token + self._pair * start
        # The positive root of each * n + pair / 2 * n^2 = left, without a difference of large numbers.
        most = int(2 * self._left / (each + math.sqrt(each * each + 2 * self._pair * self._left)))
        if most >= count:
            return count
        power = 1 << max(most, 1).bit_length() - 1
        return min(count, max(CHUNK, power + power // 2 if most >= power + power // 2 else power))

    def take(self, start: int, count: int) -> None:
        """The step takes `count` tokens from position `start` on."""
        self._left -= self._of(start, count)

    def _of(self, start: int, count: int) -> float:
        return count * (self._token + self._pair * (start + count / 2))
