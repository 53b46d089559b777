"""Kernels that the compiler made slow: correct ones, at a fraction of their speed or with spills.

Only ptxas's output shows it. No call fails for it: a build warns, and whoever chooses kernels asks
here what is known in this process. Where another is at hand it takes the place.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.manifest import KernelBeside, KernelEntry
from flashsmith.families import KernelConfig, Semantics

# Parts of ptxas's messages about wgmma that wait for one another and an ignored setmaxnreg.
_SLOW = ("serialized", "'setmaxnreg' ignored")

# What ptxas said of the kernels of this process's libraries, by architecture, semantics and config.
_noted: dict[tuple[int, Semantics, KernelConfig], KernelEntry] = {}


def slowing_warnings(kernel: KernelEntry) -> list[str]:
    """ptxas's warnings about a slow kernel of the config.

    Warnings about a kernel beside the main one begin with its role.
    """
    return [
        prefix + warning
        for prefix, one in _named(kernel)
        for warning in one.warnings
        if any(word in warning for word in _SLOW)
    ]


def losses(kernel: KernelEntry) -> list[str]:
    """Those warnings and, in the same form, spills; empty for kernels without either."""
    return slowing_warnings(kernel) + [
        f"{prefix}{one.spill_store_bytes} bytes of registers are spilled and "
        f"{one.spill_load_bytes} loaded back per thread"
        for prefix, one in _named(kernel)
        if one.spill_bytes
    ]


def _named(kernel: KernelEntry) -> list[tuple[str, KernelEntry | KernelBeside]]:
    return [("", kernel), *((f"{one.role}: ", one) for one in kernel.beside)]


def slow_kernels(kernels: Iterable[KernelEntry]) -> list[KernelEntry]:
    """Those with losses, of families for which that matters."""
    return [one for one in kernels if one.config.family.must_not_spill and losses(one)]


# --- what is known in this process ---------------------------------------------------------------


def note_slow(library: KernelLibrary) -> list[KernelEntry]:
    """Notes a library's slow kernels, and returns those that were not noted before."""
    arch, semantics = library.manifest.arch, library.manifest.semantics
    new = []
    for kernel in slow_kernels(library.manifest.kernels):
        key = arch, semantics, kernel.config
        if key not in _noted:
            _noted[key] = kernel
            new.append(kernel)
    return new


def noted_slow(config: KernelConfig, arch: int, semantics: Semantics) -> KernelEntry | None:
    """The kernel as it was noted, if it is slow."""
    return _noted.get((arch, semantics, config))


def count_noted() -> int:
    """How many are noted: what was derived from them is stale when it has changed."""
    return len(_noted)
