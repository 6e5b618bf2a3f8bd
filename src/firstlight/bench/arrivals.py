"""When requests arrive that don't wait for each other's answers."""

from __future__ import annotations

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the start at which `count` requests arrive, `rate` a second on average.

    The times between arrivals are independent and gamma distributed with shape `burstiness`: 1 is exponential, a
    Poisson process; the coefficient of variation is 1 / sqrt(burstiness). Raises ValueError unless both are positive.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate is {rate}, burstiness {burstiness}; both must be positive")
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    return [float(time) for time in np.cumsum(gaps)]
