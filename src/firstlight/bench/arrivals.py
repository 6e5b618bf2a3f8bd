"""When requests arrive that don't wait for each other's answers."""

from __future__ import annotations

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the start at which `count` requests arrive, `rate` a second on average.

    The times between arrivals are independent and gamma distributed with shape `burstiness`: 1 is exponential, a
    Poisson process; the coefficient of variation is 1 / sqrt(burstiness). Raises ValueError unless both are positive,
    and for times beyond what numbers can say.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate is {rate}, burstiness {burstiness}; both must be positive")
    with np.errstate(all="ignore"):  # checked below
        gaps = rng.gamma(burstiness, np.float64(1) / np.float64(rate * burstiness), count)
        times = np.cumsum(gaps)
    if not np.isfinite(times).all():
        raise ValueError(f"rate is {rate}, burstiness {burstiness}; too small to reckon times of arrival with")
    return [float(time) for time in times]
