"""Kernels that the compiler made slow: a build with such a shipped kernel fails.

Such a kernel computes correct results at a fraction of its speed, and only ptxas's output shows it.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashsmith.builder.manifest import KernelBeside, KernelEntry
from flashsmith.errors import CompileError
from flashsmith.families import Semantics
from flashsmith.shipped import ships

# Parts of ptxas's messages about wgmma that wait for one another and an ignored setmaxnreg.
_SLOW = ("serialized", "'setmaxnreg' ignored")


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


def check_shipped(kernels: Iterable[KernelEntry], semantics: Semantics, compiler: str) -> None:
    """Raises CompileError when `compiler` made a slow kernel of a shipped config."""
    wrong = [
        (kernel, found)
        for kernel in kernels
        if kernel.config.family.must_not_spill
        and (found := losses(kernel))
        and ships(kernel.config, semantics)
    ]
    if not wrong:
        return
    lines = [f"{compiler} makes slow kernels of shipped configs ({semantics}):"]
    for kernel, found in wrong:
        lines += [f"  {kernel.short_form}", *(f"    - {sentence}" for sentence in found)]
    lines.append(
        "Build with the compiler that flashsmith was installed with (unset CUDA_HOME), or name "
        "another config: choose() lists the runners-up"
    )
    raise CompileError("\n".join(lines))
