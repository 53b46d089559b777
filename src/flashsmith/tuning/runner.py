"""What a sweep runs on: something that compiles, something that proves and times.

Both run in worker processes and are pickled to get there; `gpu_runner` has the real ones, tests
give others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.measurement import Proof
from flashsmith.benchmark.timing import Samples
from flashsmith.errors import LaunchError
from flashsmith.families import DeviceSpec, Problem
from flashsmith.tuning.trial import COMPILE, Build, Record


@dataclass(frozen=True)
class Compiled:
    """What became of a build: the facts of its kernel and the key of its library, or the error that
    it ended with."""

    facts: KernelFacts | None = None
    library: str = ""
    error: str = ""

    def record(self, build: Build) -> Record:
        """The same as the journal has it."""
        if self.facts is not None:
            return Record(COMPILE, builds=(build,), facts=self.facts)
        return Record(COMPILE, builds=(build,), failure=("error", self.error))


class Compiler(Protocol):
    """Runs in the compile processes."""

    def open(self) -> Any:
        """Called once, in the process."""

    def compile(self, builds: Sequence[Build]) -> list[Compiled]:
        """Compiles builds of one semantics; a build that fails is an error of its own."""


class LibraryGoneError(LaunchError):
    """A library is not where its compilation left it: it has to be compiled once more."""


class TrialRunner(Protocol):
    """Runs in the measuring process. An exception disqualifies the kernel at hand, except
    LibraryGoneError, which no kernel causes."""

    def open(self) -> Any:
        """Called once, in the process: initialises the GPU."""

    def prepare(self, problem: Problem) -> None:
        """Makes a problem's tensors. Fails where the GPU is too small for them."""

    def prove(self, problem: Problem, build: Build, library: str, thorough: bool) -> Proof:
        """Runs the kernel on the problem and judges its output; `thorough` looks at more of it."""

    def time(
        self,
        problem: Problem,
        kernels: Sequence[tuple[Build, str]],
        least: int,
        ms: float,
        steady: bool,
    ) -> list[Samples]:
        """Launches every (build, library) at least `least` times and for `ms` milliseconds in all,
        interleaved; `steady` warms the GPU up first, until its clock has settled."""


class Libraries(Protocol):
    """The libraries of a machine, for others that do not share its cache."""

    def has(self, library: str) -> bool:
        """Whether the one with this key is here, whole."""

    def pack(self, library: str) -> bytes:
        """One that is here. Raises LibraryGoneError when it is not, or no longer."""

    def unpack(self, library: str, packed: bytes) -> None:
        """Puts one here that another machine packed; an exception where it cannot be trusted."""


@dataclass(frozen=True)
class Runner:
    """A way to compile and to measure, for one device.

    environment: what figures depend on, by name; a journal's records count only where it is the
    same. origin: what rows of figures say of it. process_environment: the environment variables of
    the measuring process, None for this one's. libraries: how what one machine compiled gets to
    another, None where all share a cache.
    """

    compiler: Compiler
    bench: TrialRunner
    device: DeviceSpec
    environment: dict[str, str]
    origin: dict[str, Any] = field(default_factory=dict)
    process_environment: dict[str, str] | None = None
    libraries: Libraries | None = None
