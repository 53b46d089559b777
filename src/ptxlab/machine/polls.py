"""Polls: records the words that a polling loop has read, and finds out whether they have changed
since."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptxlab.interface import Site
from ptxlab.machine.memory import GlobalMemory


@dataclass(frozen=True, slots=True)
class Poll:
    """The words that some threads of a group read with one instruction.

    ``positions`` are these threads' indices in the group, ascending.

    ``words`` (threads, count) are unsigned integers of ``size`` bytes. The words of a thread are
    consecutive and begin at its address.
    """

    site: Site
    positions: np.ndarray
    addresses: np.ndarray
    words: np.ndarray
    size: int
    count: int

    @staticmethod
    def of(
        site: Site,
        positions: np.ndarray,
        addresses: np.ndarray,
        read: np.ndarray,
        size: int,
        count: int,
    ) -> Poll:
        """Makes the poll for the elements that a load returned, which are ``size * count`` bytes
        per thread."""
        return Poll(site, positions, addresses, _words(read, size, count), size, count)

    def part(self, mask: np.ndarray) -> Poll:
        """Returns the poll of only the threads in ``mask``."""
        kept = mask[self.positions]
        places = (np.cumsum(mask) - 1)[self.positions[kept]]
        words = self.words[kept]
        return Poll(self.site, places, self.addresses[kept], words, self.size, self.count)

    def joined(self, other: Poll) -> Poll:
        """Returns this poll, merged with a poll of other threads at the same instruction."""
        positions = np.concatenate([self.positions, other.positions])
        turns = np.argsort(positions, kind="stable")
        addresses = np.concatenate([self.addresses, other.addresses])[turns]
        words = np.concatenate([self.words, other.words])[turns]
        return Poll(self.site, positions[turns], addresses, words, self.size, self.count)

    def at(self, positions: np.ndarray) -> Poll:
        """Returns this poll for another group, in which these threads have the indices
        ``positions``."""
        places = positions[self.positions]
        return Poll(self.site, places, self.addresses, self.words, self.size, self.count)

    def changed(self, memory: GlobalMemory) -> np.ndarray:
        """Returns, for each thread, whether one of the words that it read has changed."""
        if not self.positions.size:
            return np.zeros(0, np.bool_)
        now = _words(memory.load(self.addresses, self.size * self.count), self.size, self.count)
        return (now != self.words).any(axis=1)

    def missing(self, thread: int, memory: GlobalMemory) -> str:
        """Describes the word that would have to change for one thread; ``thread`` is an index into
        ``positions``."""
        address, words = int(self.addresses[thread]), ", ".join(map(str, self.words[thread]))
        if self.count == 1:
            return f"the word at {memory.place(address)} to change from {words}"
        return (
            f"one of the {self.count} words of {self.size} bytes at {memory.place(address)} to "
            f"change from {words}"
        )


def _words(read: np.ndarray, size: int, count: int) -> np.ndarray:
    # Words are compared as integers. In complex128, the dtype of 16-byte accesses, a NaN would
    # differ from itself and 0.0 would equal -0.0.
    return np.ascontiguousarray(read).view(f"u{size}").reshape(-1, count)
