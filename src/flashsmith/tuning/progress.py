"""What a sweep says while it runs, on standard error: a bar and the best so far, or lines."""

from __future__ import annotations

import math
import time

from rich.progress import TaskProgressColumn, TextColumn

from flashsmith.benchmark.progress import Teller
from flashsmith.time_left import format_seconds

# Between two plain lines that only say how far the sweep is.
_LINE_SECONDS = 15.0


class SweepProgress(Teller):
    """Tells how far a sweep is."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._last_line = time.monotonic()

    def __enter__(self) -> SweepProgress:
        self._begin(TaskProgressColumn(), TextColumn("{task.fields[left]}"), total=1.0, left="")
        return self

    def update(self, share: float, seconds_left: float, what: str) -> None:
        """`share` of the work, 0 to 1, is done; `what` is going on, or the best so far."""
        left = f"{format_seconds(seconds_left)} left" if math.isfinite(seconds_left) else ""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=share, left=left)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(f"[{share:4.0%}] {what}" + (f", {left}" if left else ""))
