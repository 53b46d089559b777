"""The random choices of a schedule: which group runs next, which copy arrives next, which waits are
interrupted."""

from __future__ import annotations

from random import Random

#: A hesitant schedule interrupts this fraction of the waits.
_INTERRUPTED = 0.25


class RandomSchedule(Random):
    """The random choices of a schedule. They depend only on the schedule's number, the seed.

    Odd numbers give hesitant schedules: groups are also interrupted before waits, and one copy at a
    time is delayed as long as anything else can run. This finds mistakes that appear only after a
    stall at exactly such a point, or only after many groups have overtaken another group. Other
    mistakes appear only in schedules that are not hesitant.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.hesitant = number % 2 == 1

    def interrupts_a_wait(self) -> bool:
        """Whether a group that reaches a wait lets other groups run before it tests the barrier."""
        return self.hesitant and self.random() < _INTERRUPTED
