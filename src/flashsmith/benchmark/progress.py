"""What long work says while it runs, on standard error: a bar on a terminal, else plain lines."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from flashsmith.benchmark.table import make_console

if TYPE_CHECKING:
    from flashsmith.builder import BuildEvent


class Teller:
    """Writes to standard error: lines, and on a terminal a bar below them.

    Use as a context manager; `quiet` tells nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._console = make_console(sys.stderr)
        self._bar: Progress | None = None

    def _begin(self, *columns: ProgressColumn, total: float | None, **fields: Any) -> None:
        """Shows a bar with these columns behind it where there is a terminal."""
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
        if not self.quiet:
            self._console.print(text, markup=False, soft_wrap=True)


class Narrator(Teller):
    """Tells on standard error what is going on, at once, and how far it is."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._told_of_waiting = False

    def __enter__(self) -> Narrator:
        self._begin(MofNCompleteColumn(), TimeElapsedColumn(), total=None)
        return self

    def step(self, what: str, done: int, total: int) -> None:
        """`done` of `total` are through and `what` is next: the bar's text, or a line."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=done, total=total)
        elif done < total:
            self.say(f"{what} ({done + 1} of {total})")

    def build(self, event: BuildEvent) -> None:
        """A builder's event; fits the builder's `progress` argument."""
        if self._bar is not None:
            what = {"compile": "compiling"}.get(event.stage, event.message)
            self._bar.update(self._task, description=what, completed=event.done, total=event.total)
        if event.stage == "compile" and event.entry is not None:
            self.say(f"  [{event.done}/{event.total}] {event.message}")
        elif event.stage == "compile":
            self.say(f"building {event.message}")
        elif event.stage == "warn":
            self.say(f"warning: {event.message}")
        elif event.stage == "done":
            self.say(event.message)
        elif event.stage == "wait" and not self._told_of_waiting:
            self._told_of_waiting = True
            self.say(event.message)
