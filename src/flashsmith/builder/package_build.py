"""Builds the libraries of a kernel package.

Each combination of family and semantics has a few libraries. Their contents do not depend on where
and when they are built, or on how many compilers run in parallel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from flashsmith import env
from flashsmith.builder.build_progress import BuildEvent
from flashsmith.builder.compile_time import expected_seconds
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.library_build import build_from
from flashsmith.builder.processes import end_all
from flashsmith.builder.sources import package_sources
from flashsmith.families import KernelConfig, Semantics, by_family

# The maximum number of kernels per library. With smaller libraries, a wheel would be larger, by 0.3
# MB of host code for each library. With larger ones, more work would be lost if a build is killed,
# since the library that was being built is lost.
MOST_KERNELS = 64
# The number of compilers for each library that is being built. More would often be idle: many
# libraries have few kernels, and at the end of each library only the linker runs.
_COMPILERS = 4
_POLL_SECONDS = 0.05

# The type of a function that is called with the number of kernels that were built so far, in all
# libraries, and with the event of one library.
PackageProgress = Callable[[int, BuildEvent], None]


def library_groups(
    kernels: Mapping[Semantics, Iterable[KernelConfig]],
) -> list[tuple[Semantics, Sequence[KernelConfig]]]:
    """The configs of each library in a package, with their semantics."""
    groups: list[tuple[Semantics, Sequence[KernelConfig]]] = []
    for semantics, configs in sorted(kernels.items()):
        ordered = sorted(set(configs), key=lambda cfg: (cfg.FAMILY, cfg.to_ints()))
        for family in by_family(ordered):
            count = -(-len(family) // MOST_KERNELS)
            groups += [(semantics, family[first::count]) for first in range(count)]
    return groups


def package_seconds(kernels: Mapping[Semantics, Iterable[KernelConfig]], jobs: int) -> float:
    """The expected wall time for compiling all kernels, in seconds."""
    return sum(expected_seconds(cfg) for found in kernels.values() for cfg in found) / jobs


def build_package(
    kernels: Mapping[Semantics, Iterable[KernelConfig]],
    *,
    arch: int,
    cpu: str | None = None,
    jobs: int | None = None,
    progress: PackageProgress = lambda built, event: None,
    csrc: Path | None = None,
) -> list[KernelLibrary]:
    """Builds the libraries of a package with these kernels, for a wheel. With many ``jobs``,
    several libraries are built at a time.

    Libraries that are finished are kept in the kernel cache, so that a build that was interrupted
    can be continued. ``cpu`` is the processor that will run the libraries, x86_64 or aarch64; None
    is this machine's processor. ``csrc`` replaces the sources in this package. Raises the errors of
    ``build``, and CompileError if a library would need system libraries that are too new.
    """
    groups = library_groups(kernels)
    jobs = env.jobs() if jobs is None else jobs
    at_once = max(1, min(len(groups), jobs // _COMPILERS))
    counter = _Counter(progress)

    def build_one(number: int) -> KernelLibrary:
        semantics, configs = groups[number]
        return build_from(
            csrc or package_sources(),
            configs,
            arch=arch,
            semantics=semantics,
            jobs=jobs // at_once,
            progress=lambda event: counter.count(number, len(configs), event),
            packaged=True,
            cpu=cpu,
        )

    if at_once == 1:
        return [build_one(number) for number in range(len(groups))]
    return _in_parallel(build_one, _longest_first(groups), at_once)


def _longest_first(groups: Sequence[tuple[Semantics, Sequence[KernelConfig]]]) -> list[int]:
    """The indices of the libraries, the one that takes longest first."""
    seconds = [sum(map(expected_seconds, configs)) for _, configs in groups]
    return sorted(range(len(groups)), key=lambda number: -seconds[number])


def _in_parallel(
    build_one: Callable[[int], KernelLibrary], order: Sequence[int], at_once: int
) -> list[KernelLibrary]:
    """Builds the libraries with these indices in this order, ``at_once`` at a time; returns them in
    the order of their indices.

    If one fails or a signal arrives, the compilers of the others are killed.
    """
    with ThreadPoolExecutor(at_once) as pool:
        futures = {number: pool.submit(build_one, number) for number in order}
        try:
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures.values()):
                end_all()  # Again, because a thread may just have started the next compiler
                time.sleep(_POLL_SECONDS)
            raise
    return [futures[number].result() for number in sorted(futures)]


class _Counter:
    """Counts the kernels of all libraries. Events of several threads are reported one at a time."""

    def __init__(self, progress: PackageProgress) -> None:
        self._progress = progress
        self._built: dict[int, int] = {}
        self._lock = threading.Lock()

    def count(self, library: int, kernels: int, event: BuildEvent) -> None:
        with self._lock:
            if event.stage in ("done", "reuse"):
                self._built[library] = kernels
            elif event.entry is not None and event.stage == "compile":
                self._built[library] = self._built.get(library, 0) + 1
            self._progress(sum(self._built.values()), event)
