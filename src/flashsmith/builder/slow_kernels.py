"""Slow kernels: kernels whose results are correct, but which the compiler made slow, by spills or
in other ways.

Only the output of ptxas shows that a kernel is slow. A build warns about a slow kernel, but a call
never fails because of it. This module knows which kernels have been found to be slow in this
process; the chooser then takes another kernel if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.manifest import AdditionalKernel, KernelEntry
from flashsmith.families import KernelConfig, Semantics

# Words that occur in messages of ptxas about serialised wgmma and about an ignored setmaxnreg.
_SLOW = ("serialized", "'setmaxnreg' ignored")

# The slow kernels in libraries that this process has opened, by architecture, semantics and config.
_noted: dict[tuple[int, Semantics, KernelConfig], KernelEntry] = {}


def slowing_warnings(kernel: KernelEntry) -> list[str]:
    """Returns those warnings of ptxas which say that a kernel of the config is slow.

    A warning about an additional kernel begins with the role of the kernel.
    """
    return [
        prefix + warning
        for prefix, one in _named(kernel)
        for warning in one.warnings
        if any(word in warning for word in _SLOW)
    ]


def losses(kernel: KernelEntry) -> list[str]:
    """Returns the slowing_warnings(), followed by register spills in the same form; [] if there are
    none."""
    return slowing_warnings(kernel) + [
        f"{prefix}{one.spill_store_bytes} bytes of registers are spilled and "
        f"{one.spill_load_bytes} loaded back per thread"
        for prefix, one in _named(kernel)
        if one.spill_bytes
    ]


def _named(kernel: KernelEntry) -> list[tuple[str, KernelEntry | AdditionalKernel]]:
    return [("", kernel), *((f"{one.role}: ", one) for one in kernel.beside)]


def slow_kernels(kernels: Iterable[KernelEntry]) -> list[KernelEntry]:
    """The ``kernels`` that have losses() and belong to a family whose kernels must not spill."""
    return [one for one in kernels if one.config.family.must_not_spill and losses(one)]


# --- what is known in this process ---------------------------------------------------------------


def note_slow(library: KernelLibrary) -> list[KernelEntry]:
    """Notes the slow kernels of a library. Returns the ones that were not noted before."""
    arch, semantics = library.manifest.arch, library.manifest.semantics
    new = []
    for kernel in slow_kernels(library.manifest.kernels):
        key = arch, semantics, kernel.config
        if key not in _noted:
            _noted[key] = kernel
            new.append(kernel)
    return new


def noted_slow(config: KernelConfig, arch: int, semantics: Semantics) -> KernelEntry | None:
    """The entry noted for this kernel; None if it was not noted as slow."""
    return _noted.get((arch, semantics, config))


def count_noted() -> int:
    """Returns the number of kernels that were noted.

    If this number has changed, results that were computed from the noted kernels are out of date.
    """
    return len(_noted)
