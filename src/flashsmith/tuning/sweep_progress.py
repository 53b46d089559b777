"""SweepProgress: reports the progress of a sweep while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.progress import TaskID, TaskProgressColumn, TextColumn

from flashsmith.benchmark.progress import LineReporter
from flashsmith.pluralize import pluralize
from flashsmith.time_left import format_seconds

# Seconds between two lines of progress.
_LINE_SECONDS = 15.0


class SweepProgress(LineReporter):
    """Reports progress and the best kernels so far on standard error, as a bar or as plain lines.

    If there are several GPUs, each has its line. `events`, if given, is called with a dictionary
    for each event.
    """

    def __init__(
        self, quiet: bool = False, events: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        super().__init__(quiet)
        self._events = events
        self._last_line = time.monotonic()
        self._gpus: dict[str, TaskID] = {}

    def __enter__(self) -> SweepProgress:
        self._begin(TaskProgressColumn(), TextColumn("{task.fields[left]}"), total=1.0, left="")
        return self

    def emit(self, event: str, **facts: Any) -> None:
        """Calls `events` with an event, if it is given."""
        if self._events is not None:
            self._events({"event": event, **facts})

    def update(self, share: float, seconds_left: float, doing: Mapping[str, str]) -> None:
        """Shows the `share` of the work that is done, from 0 to 1, and what each GPU is `doing`."""
        left = f"{format_seconds(seconds_left)} left" if math.isfinite(seconds_left) else ""
        several = len(doing) > 1 or bool(self._gpus)
        what = pluralize(len(doing), "GPU") if several else "".join(doing.values())
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=share, left=left)
            if several:
                self._show_gpus(doing)
        if time.monotonic() - self._last_line < _LINE_SECONDS:
            return
        self._last_line = time.monotonic()
        seconds = seconds_left if math.isfinite(seconds_left) else None
        self.emit("progress", share=share, seconds_left=seconds, gpus=dict(doing))
        if self._bar is None:
            self.say(f"[{share:4.0%}] {what}" + (f", {left}" if left else ""))
            for name, one in doing.items() if several else ():
                self.say(f"    {name}: {one}")

    def _show_gpus(self, doing: Mapping[str, str]) -> None:
        assert self._bar is not None
        for name in self._gpus.keys() - doing.keys():
            self._bar.remove_task(self._gpus.pop(name))
        for name, one in doing.items():
            if name not in self._gpus:
                self._gpus[name] = self._bar.add_task("", total=None, left="")
            self._bar.update(self._gpus[name], description=f"{name}: {one}")
