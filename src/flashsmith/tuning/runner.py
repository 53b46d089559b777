"""The interfaces that a sweep uses: a compiler, and a bench that checks and times kernels.

Both are pickled, and run in worker processes. `gpu_runner` implements both interfaces for GPUs;
tests use other implementations.
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
class BuildResult:
    """The result of a build: the facts about the kernel and the key of its library, or an error."""

    facts: KernelFacts | None = None
    library: str = ""
    error: str = ""

    def record(self, build: Build) -> Record:
        """The result as a record for the journal."""
        if self.facts is not None:
            return Record(COMPILE, builds=(build,), facts=self.facts)
        return Record(COMPILE, builds=(build,), failure=("error", self.error))


class Compiler(Protocol):
    """Compiles kernels; runs in the compile processes."""

    def open(self) -> Any:
        """Called once when the process begins."""

    def compile(self, builds: Sequence[Build]) -> list[BuildResult]:
        """Compiles builds that all have the same semantics.

        If a build fails, its result is an error.
        """


class LibraryGoneError(LaunchError):
    """A compiled library has disappeared; it must be compiled again."""


class TrialRunner(Protocol):
    """Checks and times kernels; runs in the measuring process.

    If a method raises an exception, the kernel that it runs is disqualified. The exception to this
    is LibraryGoneError, which is never a kernel's fault.
    """

    def open(self) -> Any:
        """Called once when the process begins; initialises the GPU."""

    def prepare(self, problem: Problem) -> None:
        """Makes the tensors of a problem.

        Raises an error if the tensors do not fit into the GPU's memory.
        """

    def prove(self, problem: Problem, build: Build, library: str, thorough: bool) -> Proof:
        """Runs the kernel on the problem and checks its output; if `thorough`, more elements of the
        output are checked."""

    def time(
        self,
        problem: Problem,
        kernels: Sequence[tuple[Build, str]],
        least: int,
        ms: float,
        steady: bool,
    ) -> list[Samples]:
        """Times several kernels interleaved: launches each (build, library) at least `least` times
        and for at least `ms` milliseconds. If `steady`, the GPU is first warmed up until its clock
        has settled."""


class Libraries(Protocol):
    """The compiled libraries on a machine, for transfer to machines that do not share that
    machine's cache."""

    def has(self, library: str) -> bool:
        """Whether the library with this key is on this machine and intact."""

    def pack(self, library: str) -> bytes:
        """The library, packed for transfer.

        Raises LibraryGoneError if the library is not, or is no longer, on this machine.
        """

    def unpack(self, library: str, packed: bytes) -> None:
        """Stores a library that another machine has packed.

        Raises an error if the library cannot be trusted.
        """


@dataclass(frozen=True)
class Runner:
    """Everything that is needed to compile kernels for one device and to measure them on this
    device.

    environment: everything on which measured times depend, by name; the records of a journal are
        valid only for the same environment.
    origin: the facts about the environment that rows store.
    process_environment: the environment variables of the measuring process; if None, those of this
        process.
    libraries: transfers compiled libraries between machines; None if all machines share a cache.
    """

    compiler: Compiler
    bench: TrialRunner
    device: DeviceSpec
    environment: dict[str, str]
    origin: dict[str, Any] = field(default_factory=dict)
    process_environment: dict[str, str] | None = None
    libraries: Libraries | None = None
