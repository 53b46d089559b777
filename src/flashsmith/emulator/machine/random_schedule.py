"""The chances of a random schedule: who comes first, what arrives, who is interrupted."""

from __future__ import annotations

from random import Random

#: Share of the waits of a hesitant schedule that are interrupted.
_INTERRUPTED = 0.25


class RandomSchedule(Random):
    """The chances of a random schedule, which its number decides.

    Odd numbers are hesitant: groups are interrupted before waits too, and one copy after the other
    is held back for as long as anything else can happen. That shows what is wrong only if someone
    stalls just there, or if many overtake one; other mistakes show only without it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.hesitant = number % 2 == 1

    def interrupts_a_wait(self) -> bool:
        """Whether a group that comes to a wait lets others have a turn before it looks."""
        return self.hesitant and self.random() < _INTERRUPTED
