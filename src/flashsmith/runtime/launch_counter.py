"""Counts the kernels that this process has launched, to prove that a model ran on them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Backend = Literal["gpu", "emulator"]

_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A thread of the parent may have held it.
os.register_at_fork(after_in_child=_new_lock)

_launched: dict[Backend, int] = {"gpu": 0, "emulator": 0}


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
    with _lock:
        _launched[backend] += kernels


def launch_count() -> Launches:
    """What the process has launched since it started, in all its threads.

    A CUDA graph counts while it is captured, not when it is replayed: a replay runs no Python.
    """
    with _lock:
        return Launches(**_launched)


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
