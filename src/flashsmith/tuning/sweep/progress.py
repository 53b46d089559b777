"""What a sweep says while it runs, on standard error: a bar and the best so far, or lines."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.table import Column

from flashsmith.benchmark.table import make_console

# Between two plain lines that only say how far the sweep is.
_LINE_SECONDS = 15.0


class SweepProgress:
    """Tells how far a sweep is. Use as a context manager; `quiet` tells nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = make_console(sys.stderr)
        self._quiet = quiet
        self._bar: Progress | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> SweepProgress:
        if self._console.is_terminal and not self._quiet:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn(
                    "{task.description}",
                    markup=False,
                    table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
                ),
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
                expand=True,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=1.0, left="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """One line that stays."""
        if not self._quiet:
            self._console.print(text, markup=False, soft_wrap=True)

    def update(self, share: float, seconds_left: float, what: str) -> None:
        """`share` of the work, 0 to 1, is done; `what` is going on, or the best so far."""
        left = f"{format_seconds(seconds_left)} left" if math.isfinite(seconds_left) else ""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=share, left=left)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(f"[{share:4.0%}] {what}" + (f", {left}" if left else ""))


def format_seconds(seconds: float) -> str:
    """For example '45s', '3m20s' or '1h05m'."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"
