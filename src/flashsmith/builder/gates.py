"""What a shipped kernel must not be: one that the compiler made slow.

Such a kernel of a family that must not spill computes the right thing at a fraction of its speed,
and nothing but ptxas says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashsmith.builder.manifest import KernelEntry
from flashsmith.errors import CompileError
from flashsmith.families import Semantics
from flashsmith.shipped import ships

# In ptxas's words: products that wait for one another, and warpgroups that keep their registers.
_SLOW = ("serialized", "'setmaxnreg' ignored")


def slowing_warnings(kernel: KernelEntry) -> list[str]:
    """ptxas's warnings of what slows a kernel down for good."""
    return [warning for warning in kernel.warnings if any(word in warning for word in _SLOW)]


def losses(kernel: KernelEntry) -> list[str]:
    """Those warnings and, in words like them, that it spills; empty for a kernel that is well."""
    found = slowing_warnings(kernel)
    if kernel.spills:
        found.append(
            f"{kernel.spill_store_bytes} bytes of registers are spilled and "
            f"{kernel.spill_load_bytes} loaded back per thread"
        )
    return found


def check_shipped(kernels: Iterable[KernelEntry], semantics: Semantics, compiler: str) -> None:
    """Raises CompileError when a shipped kernel among these lost its speed in `compiler`."""
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
