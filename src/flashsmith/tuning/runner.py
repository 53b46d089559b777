"""The interfaces that a sweep runs on: a compiler, and a bench that checks and times kernels.

Both are pickled and run in worker processes. `gpu_runner` has the real implementations; tests use
fakes.
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
    """The result of a build: the facts of its kernel and the key of its library, or the error."""

    facts: KernelFacts | None = None
    library: str = ""
    error: str = ""

    def record(self, build: Build) -> Record:
        """The result as a record of the journal."""
        if self.facts is not None:
            return Record(COMPILE, builds=(build,), facts=self.facts)
        return Record(COMPILE, builds=(build,), failure=("error", self.error))


class Compiler(Protocol):
    """Runs in the compile processes."""

    def open(self) -> Any:
        """Called once, in the process."""

    def compile(self, builds: Sequence[Build]) -> list[BuildResult]:
        """Compiles builds that share one semantics; each failing build returns its own error."""


class LibraryGoneError(LaunchError):
    """A compiled library has disappeared and must be compiled again."""


class TrialRunner(Protocol):
    """Runs in the measuring process. An exception disqualifies the kernel being run, except
    LibraryGoneError, which no kernel causes."""

    def open(self) -> Any:
        """Called once, in the process: initialises the GPU."""

    def prepare(self, problem: Problem) -> None:
        """Makes a problem's tensors; raises if the tensors do not fit the GPU's memory."""

    def prove(self, problem: Problem, build: Build, library: str, thorough: bool) -> Proof:
        """Runs the kernel on the problem and checks the output, more elements of it if
        `thorough`."""

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
    """A machine's libraries, for transfer to machines that do not share its cache."""

    def has(self, library: str) -> bool:
        """Whether the library with this key is here and intact."""

    def pack(self, library: str) -> bytes:
        """The packed library. Raises LibraryGoneError when this machine does not have it, or no
        longer."""

    def unpack(self, library: str, packed: bytes) -> None:
        """Stores a library that another machine packed; raises if the library cannot be trusted."""


@dataclass(frozen=True)
class Runner:
    """Compiles and measures for one device.

    environment: what figures depend on, by name; a journal's records are valid only for the same
    environment. origin: what rows of figures record about the environment. process_environment: the
    environment variables of the measuring process, or None to inherit this process's variables.
    libraries: transfers compiled libraries between machines; None if all share a cache.
    """

    compiler: Compiler
    bench: TrialRunner
    device: DeviceSpec
    environment: dict[str, str]
    origin: dict[str, Any] = field(default_factory=dict)
    process_environment: dict[str, str] | None = None
    libraries: Libraries | None = None
