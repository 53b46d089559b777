"""Estimates the remaining time from an initial estimate and the time taken so far."""

from __future__ import annotations

import time

# When this share of the work is done, the time taken so far weighs as much as the initial estimate.
_PRIOR = 0.1


class TimeLeft:
    """Starts counting now; `total` is the estimate for all of the work, in seconds."""

    def __init__(self, total: float) -> None:
        self.total = total
        self._start = time.monotonic()

    def after(self, done: float) -> float:
        """The remaining seconds after finishing work that was estimated at `done` seconds."""
        if self.total <= 0:
            return 0.0
        prior = _PRIOR * self.total
        pace = (time.monotonic() - self._start + prior) / (done + prior)
        return max(0.0, self.total - done) * pace


def format_seconds(seconds: float) -> str:
    """For example '45s', '3m20s' or '1h05m'."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"
