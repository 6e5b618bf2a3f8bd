"""The shape of a step: what costs depend on, as numbers or as numpy arrays with one entry for each of many steps.

A step has a decode part (each row with a few new tokens) and a prefill part, as a `StepBatch` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one kind: sums over them.

    requests: rows. tokens: new tokens. keys: sum over rows of the context with this step, in tokens. pairs: sum over new
    tokens of the keys that each sees (itself included). longest: new tokens of the longest row.
    """

    requests: Numbers
    tokens: Numbers
    keys: Numbers
    pairs: Numbers
    longest: Numbers

    @classmethod
    def even(cls, requests: ArrayLike, query: ArrayLike, context: ArrayLike) -> Part:
        """`requests` rows of `query` new tokens each, whose context is then `context` (at least `query`)."""
        rows, new, total = (np.asarray(value, dtype=np.float64) for value in (requests, query, context))
        if np.any(total < new) or np.any(new < 0) or np.any(rows < 0):
            raise ValueError(f"a row's context ({context!r}) holds its new tokens ({query!r}), and neither is negative")
        return cls(
            *np.broadcast_arrays(rows, rows * new, rows * total, rows * _seen(new, total), np.where(rows > 0, new, 0))
        )

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, int]]) -> Part:
        """Rows as (new tokens, context with them)."""
        query, context = (np.array([row[i] for row in rows], dtype=np.float64) for i in range(2))
        sums = (len(rows), query.sum(), context.sum(), _seen(query, context).sum(), query.max(initial=0))
        return cls(*(np.asarray(value, dtype=np.float64) for value in sums))

    def limited(self, limit: int) -> tuple[Numbers, Numbers]:
        """(keys, pairs) where a token sees only `limit` of its keys; exact for rows that are alike."""
        rows = np.maximum(self.requests, 1)
        query, context = self.tokens / rows, self.keys / rows
        seen = _seen_limited(context, limit) - _seen_limited(context - query, limit)
        return np.minimum(self.keys, self.requests * (limit + query)), np.minimum(self.pairs, self.requests * seen)

    def __add__(self, other: Part) -> Part:
        return Part(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.keys + other.keys,
            self.pairs + other.pairs,
            np.maximum(self.longest, other.longest),
        )


def _seen(query: Numbers, context: Numbers) -> Numbers:
    """Keys seen by `query` tokens, the last of which stands at `context`."""
    return query * context - query * (query - 1) / 2


def _seen_limited(tokens: Numbers, limit: int) -> Numbers:
    """Keys seen by the first `tokens` tokens of a row, each at most `limit`."""
    inside = np.minimum(tokens, limit)
    return inside * (inside + 1) / 2 + (tokens - inside) * limit


NOTHING = Part.even(0, 0, 0)


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step, or many: every field of the parts has the shape of the whole set."""

    decode: Part = field(default_factory=lambda: NOTHING)
    prefill: Part = field(default_factory=lambda: NOTHING)

    @classmethod
    def of_decode(cls, requests: ArrayLike, context: ArrayLike, query: ArrayLike = 1) -> StepShape:
        """Rows that each add `query` tokens (1, or 1 + drafts) to reach `context`."""
        return cls(decode=Part.even(requests, query, context))

    @classmethod
    def of_prefill(cls, requests: ArrayLike, tokens: ArrayLike, before: Any = 0) -> StepShape:
        """Prompts (or chunks) of `tokens` new tokens each, after `before` that are in the cache."""
        return cls(prefill=Part.even(requests, tokens, np.asarray(tokens, dtype=np.float64) + before))

    def __add__(self, other: StepShape) -> StepShape:
        """Both in one batch."""
        return StepShape(self.decode + other.decode, self.prefill + other.prefill)

    def part(self, label: str) -> Part:
        """The rows that a call site sees: "decode", "prefill", or "" for all."""
        return {"decode": self.decode, "prefill": self.prefill}.get(label) or self.decode + self.prefill

    @property
    def tokens(self) -> Numbers:
        """New tokens of the step."""
        return self.decode.tokens + self.prefill.tokens

    @property
    def logits(self) -> Numbers:
        """Rows of logits: every token of a decode row (they are verified), the last of a prompt."""
        return self.decode.tokens + self.prefill.requests


def distinct_experts(experts: int, top_k: int, tokens: Numbers, skew: float = 0.0) -> Numbers:
    """Expected share of experts that at least one of `tokens` is routed to.

    skew: 0 for uniform routing; otherwise the popularity of the i-th expert falls as i^-skew (a power law). A token picks
    `top_k` different experts; each expert's chance is scaled to that sum and capped at 1.
    """
    tokens = np.asarray(tokens, dtype=np.float64)
    popularity = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    chance = np.full(experts, top_k / experts)
    if skew:
        chance = np.minimum(popularity * top_k / popularity.sum(), 1.0)
        for _ in range(64):  # what capped experts can't take goes to the others
            free = chance < 1.0
            missing = top_k - chance.sum()
            if missing < 1e-9 or not free.any():
                break
            chance = np.where(free, np.minimum(chance * (1 + missing / chance[free].sum()), 1.0), chance)
    with np.errstate(divide="ignore"):
        missed = np.exp(np.multiply.outer(tokens, np.log1p(-np.minimum(chance, 1 - 1e-15))))
    return 1.0 - missed.mean(axis=-1)
