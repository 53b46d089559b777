"""The kernels that this folder's tests run: those of the cover of the grid, each built once."""

from __future__ import annotations

from functools import cache
from itertools import product

from flashsmith.builder import library_for
from flashsmith.families import KernelConfig, Semantics
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.verify.grid import Case, covering_cases

MMA_SYNC = "mma_sync"

# Packed kernels are uneven ones.
SEMANTICS = [
    Semantics(mask, softcap, packed, uneven)
    for mask, softcap, packed, uneven in product(
        ("none", "causal", "window"), (False, True), (False, True), (False, True)
    )
    if uneven or not packed
]


@cache
def cover(family: str = MMA_SYNC) -> tuple[Case, ...]:
    return tuple(covering_cases(family))


@cache
def built(semantics: Semantics, arch: int = 80, family: str = MMA_SYNC) -> tuple[KernelConfig, ...]:
    """The configs of a family's cover of one semantics, sorted, their kernels loaded from one
    library."""
    configs = sorted({case.config for case in cover(family) if case.semantics == semantics})
    loaded_kernels.add(library_for(configs, arch=arch, semantics=semantics))
    return tuple(configs)
