"""The random choices of a schedule: which group runs first, which copy arrives, which wait is
interrupted."""

from __future__ import annotations

from random import Random

#: Share of the waits of a hesitant schedule that are interrupted.
_INTERRUPTED = 0.25


class RandomSchedule(Random):
    """The random choices of a schedule, decided by its number.

    Odd numbers are hesitant: groups are interrupted before waits too, and one copy after the other
    is delayed while anything else can run. That finds mistakes which need a stall at just that
    point, or many groups overtaking one; other mistakes show only without it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.hesitant = number % 2 == 1

    def interrupts_a_wait(self) -> bool:
        """Whether a group that reaches a wait lets other groups run before it tests the barrier."""
        return self.hesitant and self.random() < _INTERRUPTED
