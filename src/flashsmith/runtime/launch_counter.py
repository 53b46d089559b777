"""Counts the kernels that this process has launched, to prove that a model ran on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Literal

Backend = Literal["gpu", "emulator"]

# How many plans of so many kernels were launched. One step of an iterator is one call of C, which
# no other thread comes between: a lock would take a repeated call's two launches a microsecond.
_Plans = defaultdict[int, "count[int]"]
_launched: dict[Backend, _Plans] = {
    "gpu": defaultdict(partial(count, 0)),
    "emulator": defaultdict(partial(count, 0)),
}


@dataclass
class Launches:
    """Kernels launched on a GPU, and kernels that the emulator executed."""

    gpu: int = 0
    emulator: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.gpu + self.emulator


def note_launch(backend: Backend, kernels: int = 1) -> None:
    """Counts a plan's kernels; called where they were launched, after the launch was accepted."""
    next(_launched[backend][kernels])


def launch_count() -> Launches:
    """What the process has launched since it started, in all its threads.

    A CUDA graph counts while it is captured, not when it is replayed: a replay runs no Python.
    """
    return Launches(**{backend: _total(plans) for backend, plans in _launched.items()})


def _total(plans: _Plans) -> int:
    # The text of a count has its next number; there is no other way to it but a step.
    return sum(
        kernels * int(repr(steps)[len("count(") : -1]) for kernels, steps in [*plans.items()]
    )


@contextmanager
def count_launches() -> Iterator[Launches]:
    """Counts what is launched inside the block, by any thread; read it after the block.

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
