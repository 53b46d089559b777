"""Waiting for a word of global memory: what a loop that only reads does until the word changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashsmith.emulator.interface import Site
from flashsmith.emulator.machine.group import Group
from flashsmith.emulator.machine.memory import GlobalMemory
from flashsmith.emulator.machine.waits import Wait


@dataclass(frozen=True, slots=True)
class Poll:
    """The words that threads of a group (by position) have read at their addresses."""

    site: Site
    positions: np.ndarray
    addresses: np.ndarray
    words: np.ndarray
    size: int

    def part(self, mask: np.ndarray) -> Poll:
        """What the threads in ``mask`` have read."""
        kept = mask[self.positions]
        places = (np.cumsum(mask) - 1)[self.positions[kept]]
        return Poll(self.site, places, self.addresses[kept], self.words[kept], self.size)


class MemoryWait(Wait):
    """A group that goes round a loop until one of the words it reads there has changed."""

    def __init__(
        self, group: Group, memory: GlobalMemory, polls: Sequence[Poll], ctas_to_come: int
    ) -> None:
        super().__init__(group, polls[-1].site)
        self.memory, self.polls, self.ctas_to_come = memory, polls, ctas_to_come

    def passed(self) -> np.ndarray:
        """Threads of which a word has changed; what read nothing may go on."""
        waits, changed = np.zeros(self.group.n, np.bool_), np.zeros(self.group.n, np.bool_)
        for poll in self.polls:
            waits[poll.positions] = True
            now = self.memory.load(poll.addresses, poll.size) if poll.positions.size else poll.words
            changed[poll.positions] |= now != poll.words
        return changed | ~waits

    def part(self, group: Group, mask: np.ndarray) -> Wait:
        """The same for the threads in ``mask``, which are now ``group``."""
        polls = [poll.part(mask) for poll in self.polls]
        return MemoryWait(group, self.memory, polls, self.ctas_to_come)

    def reasons(self) -> list[tuple[np.ndarray, str]]:
        """The words that do not change, one after the other."""
        found = []
        for poll in self.polls:
            for address in np.unique(poll.addresses)[:4]:
                of = poll.addresses == address
                words = f"{self.memory.place(int(address))} to change from {poll.words[of][0]}"
                if self.ctas_to_come:
                    words += (
                        f" ({self.ctas_to_come} CTAs that come later in the launch are not "
                        "resident before others exit)"
                    )
                found.append((poll.positions[of], words))
        return found

    def grant(self, mask: np.ndarray | None = None) -> None:
        """Nothing to note: the loop reads the word again."""
