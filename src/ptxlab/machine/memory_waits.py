"""Waits for words of global memory: a polling loop sleeps until one of the words that it read
changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ptxlab.machine.group import Group
from ptxlab.machine.memory import GlobalMemory
from ptxlab.machine.polls import Poll
from ptxlab.machine.waits import Wait


class MemoryWait(Wait):
    """The wait of a group in a polling loop.

    It ends when one of the words that the loop reads has changed.
    """

    def __init__(
        self, group: Group, memory: GlobalMemory, polls: Sequence[Poll], ctas_to_come: int
    ) -> None:
        super().__init__(group, polls[-1].site)
        self.memory, self.polls, self.ctas_to_come = memory, polls, ctas_to_come

    def passed(self) -> np.ndarray:
        """Returns, for each thread, whether it may continue, because a word that it read has
        changed or because it has read no word."""
        waits, changed = np.zeros(self.group.n, np.bool_), np.zeros(self.group.n, np.bool_)
        for poll in self.polls:
            waits[poll.positions] = True
            changed[poll.positions] |= poll.changed(self.memory)
        return changed | ~waits

    def part(self, group: Group, mask: np.ndarray) -> Wait:
        """Returns the same wait for only the threads in ``mask``, which are now ``group``."""
        polls = [poll.part(mask) for poll in self.polls]
        return MemoryWait(group, self.memory, polls, self.ctas_to_come)

    def reasons(self) -> list[tuple[np.ndarray, str]]:
        """Returns the words that would have to change."""
        found = []
        for poll in self.polls:
            for address in np.unique(poll.addresses)[:4]:
                of = poll.addresses == address
                words = poll.missing(int(np.argmax(of)), self.memory)
                if self.ctas_to_come:
                    words += (
                        f" ({self.ctas_to_come} later CTAs of the launch do not become resident "
                        "before others exit)"
                    )
                found.append((poll.positions[of], words))
        return found

    def grant(self, mask: np.ndarray | None = None) -> None:
        """Does nothing: the loop reads the word again, so observers see that read."""
