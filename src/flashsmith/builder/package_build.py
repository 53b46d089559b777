"""Builds the libraries of a kernel package.

Each combination of family and semantics has a few libraries. Their contents do not depend on where
and when they are built, or on how many compilers run in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flashsmith.builder.build_progress import BuildEvent
from flashsmith.builder.compile_time import expected_seconds
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.library_build import build_from
from flashsmith.builder.sources import package_sources
from flashsmith.families import KernelConfig, Semantics, by_family

# The maximum number of kernels per library. With smaller libraries, a wheel would be larger, by 0.3
# MB of host code for each library. With larger ones, more work would be lost if a build is killed,
# since the library that was being built is lost.
MOST_KERNELS = 64

# The type of a function that is called with the number of kernels that were built so far and with
# the event.
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
    """Builds the libraries of a package with these kernels, for a wheel.

    Libraries that are finished are kept in the kernel cache, so that a build that was interrupted
    can be continued. ``cpu`` is the processor that will run the libraries, x86_64 or aarch64; None
    is this machine's processor. ``csrc`` replaces the sources in this package. Raises the errors of
    ``build``, and CompileError if a library would need system libraries that are too new.
    """
    libraries: list[KernelLibrary] = []
    built = 0
    for semantics, configs in library_groups(kernels):

        def report(event: BuildEvent, before: int = built) -> None:
            progress(before, event)

        libraries.append(
            build_from(
                csrc or package_sources(),
                configs,
                arch=arch,
                semantics=semantics,
                jobs=jobs,
                progress=report,
                packaged=True,
                cpu=cpu,
            )
        )
        built += len(configs)
    return libraries
