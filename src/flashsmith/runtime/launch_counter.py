"""Counts the kernels that this process has launched, to prove that a model used these kernels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Literal

Backend = Literal["gpu", "emulator"]

# Each thread has its own counter, so that a repeated call needs no lock.
launched: defaultdict[tuple[int, Backend], int] = defaultdict(int)


@dataclass
class Launches:
    """Kernels launched on a GPU, and kernels that the emulator executed."""

    gpu: int = 0
    emulator: int = 0

    @property
    def total(self) -> int:
        """The number of kernels that both backends launched."""
        return self.gpu + self.emulator


def note_launch(backend: Backend, kernels: int = 1) -> None:
    """Counts a plan's kernels. The launching thread calls this after the launch was accepted."""
    launched[get_ident(), backend] += kernels


def launch_count() -> Launches:
    """Returns how many kernels all threads of this process have launched since it started.

    A CUDA graph's kernels are counted when they are captured, not when the graph is replayed,
    because a replay runs no Python.
    """
    counted = Counter[Backend]()
    # The loop iterates over a copy, because a thread's first launch adds an entry.
    for (_, backend), kernels in [*launched.items()]:
        counted[backend] += kernels
    return Launches(counted["gpu"], counted["emulator"])


@contextmanager
def count_launches() -> Iterator[Launches]:
    """Counts the kernels that any thread launches inside the block; read the counts after it.

    ``with count_launches() as launches: ...`` and then ``launches.total``.
    """
    counted = Launches()
    before = launch_count()
    try:
        yield counted
    finally:
        after = launch_count()
        counted.gpu = after.gpu - before.gpu
        counted.emulator = after.emulator - before.emulator
