"""The random choices of a schedule: the next group, the next copy to arrive, interrupted waits."""

from __future__ import annotations

from random import Random

#: Fraction of waits that a hesitant schedule interrupts.
_INTERRUPTED = 0.25


class RandomSchedule(Random):
    """The random choices of a schedule, seeded by its number.

    Odd numbers are hesitant: groups are also interrupted before waits, and one copy at a time is
    delayed while anything else can run. This finds mistakes that need a stall at exactly that
    point, or a group that many others overtake. Other mistakes show only in a schedule that is not
    hesitant.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.hesitant = number % 2 == 1

    def interrupts_a_wait(self) -> bool:
        """Whether a group at a wait lets other groups run before it tests the barrier."""
        return self.hesitant and self.random() < _INTERRUPTED
