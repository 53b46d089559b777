"""Reports progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from flashsmith.benchmark.table import make_console
from flashsmith.time_left import TimeLeft, format_seconds

if TYPE_CHECKING:
    from flashsmith.builder import BuildEvent


# The shortest time, in seconds, between two lines that differ only in their numbers.
_LINE_SECONDS = 15.0


class LineReporter:
    """Writes lines to standard error, with a progress bar below them on a terminal.

    It is used as a context manager. If `quiet`, it writes nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._console = make_console(sys.stderr)
        self._bar: Progress | None = None

    def _begin(self, *columns: ProgressColumn, total: float | None, **fields: Any) -> None:
        """Starts a progress bar with these columns to the right of the bar, if the output is a
        terminal."""
        if not self._console.is_terminal or self.quiet:
            return
        what = TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        )
        self._bar = Progress(
            SpinnerColumn(),
            what,
            BarColumn(bar_width=20),
            *columns,
            console=self._console,
            expand=True,
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task("starting", total=total, **fields)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """Prints one line above the bar, which stays on the screen."""
        if not self.quiet:
            self._console.print(text, markup=False, soft_wrap=True)


class _Elapsed(ProgressColumn):
    """The column with the elapsed time."""

    def render(self, task: Task) -> Text:
        return Text(f"{format_seconds(task.elapsed or 0.0)} so far")


class _Remaining(ProgressColumn):
    """The column with the time left until the task's `end` (on the monotonic clock); empty if `end`
    is None.

    Until the first step is complete, `end` is only an estimate.
    """

    def render(self, task: Task) -> Text:
        end = task.fields["end"]
        left = 0.0 if end is None else end - time.monotonic()
        if left < 1:
            return Text("")
        return Text(f"{_about(left)} left" if task.completed else f"estimate: {_about(left)}")


def _about(seconds: float) -> str:
    return f"about {format_seconds(max(1.0, seconds))}"


class ProgressReporter(LineReporter):
    """Reports the current step and the overall progress on standard error."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._reported_waiting = False
        self._estimates: Sequence[float] = ()
        self._time_left = TimeLeft(0.0)
        self._last_line = ("", 0.0)

    def __enter__(self) -> ProgressReporter:
        self._begin(MofNCompleteColumn(), _Elapsed(), _Remaining(), total=None, end=None)
        return self

    def expect(self, what: str, estimates: Sequence[float]) -> None:
        """Announces how long `what` will take: `estimates` has the expected seconds of each
        step."""
        self._estimates = estimates
        self.say(f"{what} is estimated to take {_about(sum(estimates))}")

    def step(self, what: str, done: int, total: int) -> None:
        """Reports, in the bar or as a line, that `done` of `total` steps are complete and that
        `what` is next.

        The report includes the remaining time. The remaining time is computed from the estimates
        given to `expect`, or else from the duration of the steps so far.
        """
        estimates = self._estimates if len(self._estimates) == total else [1.0] * total
        if done == 0:
            self._time_left = TimeLeft(sum(estimates))
        left = self._time_left.after(sum(estimates[:done]))
        known = done > 0 or estimates is self._estimates
        if self._bar is not None:
            end = time.monotonic() + left if known else None
            self._bar.update(self._task, description=what, completed=done, total=total, end=end)
        elif done < total and self._is_news(what):
            rest = f"{_about(left)} left" if done else f"estimate: {_about(left)}"
            rest = f", {rest}" if known and left >= 1 else ""
            self.say(f"{what} ({done + 1} of {total}{rest})")

    def _is_news(self, what: str) -> bool:
        """Whether to print a line: the step differs from the step in the last line, or the last
        line is old."""
        last, since = self._last_line
        now = time.monotonic()
        if what == last and now - since < _LINE_SECONDS:
            return False
        self._last_line = (what, now)
        return True

    def build(self, event: BuildEvent) -> None:
        """Reports an event of the builder; can be passed as the builder's `progress`."""
        if self._bar is not None:
            what = {"compile": "compiling", "host": "compiling host code"}.get(
                event.stage, event.message
            )
            self._bar.update(
                self._task,
                description=what,
                completed=event.done,
                total=event.total,
                end=time.monotonic() + event.seconds_left,
            )
        if event.stage == "host" or (event.stage == "compile" and event.entry is not None):
            self.say(f"  [{event.done}/{event.total}] {event.message}")
        elif event.stage == "compile":
            self.say(f"building {event.message}")
        elif event.stage == "warn":
            self.say(f"warning: {event.message}")
        elif event.stage == "done":
            self.say(event.message)
        elif event.stage == "wait" and not self._reported_waiting:
            self._reported_waiting = True
            self.say(event.message)
