"""Microbenchmark: a ceiling that can be measured, by a kernel that does one thing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flashsmith.benchmark.roofline.ceilings import Unit
from flashsmith.families import DeviceSpec


class Absent(Exception):
    """Why a ceiling cannot be measured here: a gap that is named, and no failure."""


class Wrong(Exception):
    """A microbenchmark's output is not what it should be."""


class Kernel(Protocol):
    """What a microbenchmark needs of a loaded kernel; tests give one of their own."""

    def launch(self, ctas: int, threads: int, *arguments: Any) -> None:
        """Enqueues the kernel. Arguments are arrays (``Arrays``) and ctypes numbers."""


class Array(Protocol):
    """An array that kernels read and write."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def to_host(self) -> Any:
        """A copy as NumPy array, after all launches so far."""


class Machine(Protocol):
    """Where microbenchmarks run: the GPU, or in tests the emulator."""

    device: DeviceSpec

    def kernel(self, source: str, name: str, smem_bytes: int = 0) -> Kernel:
        """The kernel `name` of csrc/roofline/<source>.cu with so much dynamic shared memory."""

    def array(self, host: Any) -> Array:
        """A copy of a NumPy array."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory with anything in it. Raises LaunchError when there is not enough."""

    def free_bytes(self) -> int:
        """How much memory could be had."""


class Running(ABC):
    """A microbenchmark with its operands in place.

    work: FLOP, operations or bytes of one turn. first_turns: what is timed first, to find out how
    many turns take long enough.
    """

    work: float
    first_turns: int = 1000

    @abstractmethod
    def launch(self, turns: int) -> None:
        """Enqueues `turns` turns; does not wait."""

    @abstractmethod
    def check(self) -> float:
        """Runs a few turns and compares with NumPy: the largest error, relative to the results.

        Raises Wrong when it is too large.
        """


@dataclass(frozen=True)
class Microbenchmark:
    """source: the file in csrc/roofline, '' for a library's kernel. archs: the only ones that have
    its instructions, () for all.

    ``start`` raises Absent where the ceiling cannot be measured.
    """

    key: str
    unit: Unit
    source: str
    start: Callable[[Machine], Running]
    archs: tuple[int, ...] = ()

    def absence(self, arch: int) -> str:
        """Why an architecture has no such ceiling, '' where it has."""
        if self.archs and arch not in self.archs:
            return f"{self.source} is an instruction of sm_{self.archs[0]}a, and this is sm_{arch}"
        return ""


def check_error(error: float, bound: float) -> float:
    """`error`, unless it is above `bound` or no number.

    Raises Wrong.
    """
    if not error <= bound:
        raise Wrong(f"its output is wrong: relative error {error:.3g}, allowed {bound:.3g}")
    return error
