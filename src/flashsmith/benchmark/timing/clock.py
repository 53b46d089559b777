"""Clock: what measuring needs of a GPU; tests give one of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Clock(Protocol):
    """A stream of work whose progress can be marked. Everything in it runs in order."""

    def running(self) -> AbstractContextManager[None]:
        """Around all of the other calls, and around the launches between them."""

    def events(self, count: int) -> list[Any]:
        """``count`` marks, made before anything is timed."""

    def record(self, event: Any) -> None:
        """Sets a mark behind everything enqueued so far; does not wait."""

    def flush(self) -> None:
        """Enqueues what drives everything out of the L2; does not wait."""

    def synchronize(self) -> None:
        """Waits for everything enqueued so far. Raises LaunchError when some of it failed."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks that the work has passed."""
