"""Samples: what was measured of one contender."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Samples:
    """The times of one contender's timed launches, at least one, in the order they ran.

    sm_clock_mhz and power_w are medians over the readings during the timed part, None where NVML
    gave none. Interleaved contenders run within milliseconds of each other and share their values.
    """

    times_ms: tuple[float, ...]
    sm_clock_mhz: float | None = None
    power_w: float | None = None

    @property
    def median_ms(self) -> float:
        """The time that figures are made of."""
        return statistics.median(self.times_ms)

    @property
    def best_ms(self) -> float:
        """The shortest time."""
        return min(self.times_ms)

    @property
    def spread(self) -> float:
        """The interquartile range over the median; 0 for a single time."""
        if len(self.times_ms) < 2 or not self.median_ms:
            return 0.0
        lower, _, upper = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return (upper - lower) / self.median_ms
