"""Kernels that the compiler made slow: correct, but with spills or at a fraction of their speed.

Only ptxas's output shows this. Slow kernels never make a call fail. A build warns, and the chooser
looks up here which kernels this process knows to be slow. Another kernel, if available, replaces
them.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.manifest import AdditionalKernel, KernelEntry
from flashsmith.families import KernelConfig, Semantics

# Parts of ptxas's messages about serialized wgmma and an ignored setmaxnreg.
_SLOW = ("serialized", "'setmaxnreg' ignored")

# The slow kernels of this process's libraries, by architecture, semantics and config.
_noted: dict[tuple[int, Semantics, KernelConfig], KernelEntry] = {}


def slowing_warnings(kernel: KernelEntry) -> list[str]:
    """ptxas's warnings that a kernel of the config is slow.

    Warnings about an additional kernel begin with its role.
    """
    return [
        prefix + warning
        for prefix, one in _named(kernel)
        for warning in one.warnings
        if any(word in warning for word in _SLOW)
    ]


def losses(kernel: KernelEntry) -> list[str]:
    """The slowing_warnings, and register spills in the same form; empty if there are none."""
    return slowing_warnings(kernel) + [
        f"{prefix}{one.spill_store_bytes} bytes of registers are spilled and "
        f"{one.spill_load_bytes} loaded back per thread"
        for prefix, one in _named(kernel)
        if one.spill_bytes
    ]


def _named(kernel: KernelEntry) -> list[tuple[str, KernelEntry | AdditionalKernel]]:
    return [("", kernel), *((f"{one.role}: ", one) for one in kernel.beside)]


def slow_kernels(kernels: Iterable[KernelEntry]) -> list[KernelEntry]:
    """The kernels of families that must not spill whose losses() are not empty."""
    return [one for one in kernels if one.config.family.must_not_spill and losses(one)]


# --- what is known in this process ---------------------------------------------------------------


def note_slow(library: KernelLibrary) -> list[KernelEntry]:
    """Notes a library's slow kernels, and returns the kernels that were not noted before."""
    arch, semantics = library.manifest.arch, library.manifest.semantics
    new = []
    for kernel in slow_kernels(library.manifest.kernels):
        key = arch, semantics, kernel.config
        if key not in _noted:
            _noted[key] = kernel
            new.append(kernel)
    return new


def noted_slow(config: KernelConfig, arch: int, semantics: Semantics) -> KernelEntry | None:
    """The entry noted for this kernel, or None if the kernel was not noted as slow."""
    return _noted.get((arch, semantics, config))


def count_noted() -> int:
    """The number of noted kernels. When this number changes, results derived from noted kernels are
    stale."""
    return len(_noted)
