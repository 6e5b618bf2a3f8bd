"""The share that offline work keeps under constant online load, as a token bucket.

While offline work wants to run, every planned token adds `share` to its credit and every offline token takes one away.
In credit, it goes before online work: its prefill is planned first, its requests are admitted first, and those are
protected from preemption until half the bucket has been overspent and they have given as many tokens as were prefilled
for them. When much is owed because nothing fits, online admissions wait until it does. Out of credit, offline work has
what online work leaves, and is preempted for it.
"""

from __future__ import annotations

import math


class OfflineShare:
    """share: 0 to 1. bucket: tokens; the credit stays within ±bucket."""

    def __init__(self, share: float, bucket: int) -> None:
        self.share = share
        self.bucket = bucket
        self.credit = 0.0

    def settle(self, online_tokens: int, offline_tokens: int) -> None:
        """A step was planned while offline work was waiting or running."""
        credit = self.credit + self.share * (online_tokens + offline_tokens) - offline_tokens
        self.credit = min(max(credit, -self.bucket), self.bucket)

    @property
    def tokens_ahead(self) -> int:
        """Offline tokens that go before online ones in this step; 0 out of credit."""
        return max(math.ceil(self.credit), 0)

    @property
    def overdue(self) -> bool:
        """So much is owed that online admissions wait for it."""
        return self.credit >= self.bucket / 2

    @property
    def overspent(self) -> bool:
        """So much was taken that protection ends."""
        return self.credit <= -self.bucket / 2
