"""The kernels that this folder's tests run: those of the cover of the grid, built together.

A plain run takes a few problems of the cover, and one or two kernels of some semantics.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import pytest
import shared_kernels
from grids.proof_grid import Case, covering_cases

from flashsmith.families import KernelConfig, Semantics

MMA_SYNC = "mma_sync"

SEMANTICS = shared_kernels.EVERY_SEMANTICS
# With every two of mask, cap, and even, uneven and packed lengths.
QUICK_SEMANTICS = [
    Semantics.parse(words)
    for words in (
        *("plain", "softcap+uneven", "packed+uneven"),
        *("causal+softcap", "causal+uneven", "causal+softcap+packed+uneven"),
        *("window", "window+uneven", "window+softcap+packed+uneven"),
    )
]


def marked(every: Iterable[Semantics]) -> list[Any]:
    """Parameters of a test: the plain run takes the quick ones."""
    return [
        pytest.param(it, marks=[pytest.mark.full] * (it not in QUICK_SEMANTICS)) for it in every
    ]


_FACTORS = ("dtype", "d", "lengths", "window", "heads", "batch", "sinks", "schedule", "semantics")


@cache
def cover(family: str = MMA_SYNC) -> tuple[Case, ...]:
    return tuple(covering_cases(family))


@cache
def quick_cover(family: str = MMA_SYNC) -> tuple[Case, ...]:
    """Of the cover's cases few that have every value of every factor, and every quick semantics."""
    cases = [case for case in cover(family) if case.semantics in QUICK_SEMANTICS]
    open_values = {(name, getattr(case, name)) for case in cases for name in _FACTORS}
    chosen: list[Case] = []

    def rank(case: Case) -> tuple[int, bool, int]:
        gain = sum((name, getattr(case, name)) in open_values for name in _FACTORS)
        # What takes longest is to compile another kernel, then to emulate a large problem.
        new = case.config != _smallest(case.semantics, family) and all(
            (case.config, case.semantics) != (other.config, other.semantics) for other in chosen
        )
        return gain, not new, -case.lengths[0] * case.lengths[1] * case.config.d_head

    while open_values:
        best = max(cases, key=rank)
        chosen.append(best)
        open_values -= {(name, getattr(best, name)) for name in _FACTORS}
    return tuple(chosen)


def _smallest(semantics: Semantics, family: str = MMA_SYNC) -> KernelConfig:
    """The kernel of the cover with the smallest heads, which runs fastest."""
    configs = sorted({case.config for case in cover(family) if case.semantics == semantics})
    return min(configs, key=lambda config: config.d_head)


@cache
def built(
    semantics: Semantics, arch: int = 80, family: str = MMA_SYNC, whole: bool = False
) -> tuple[KernelConfig, ...]:
    """The configs of a family's ``whole`` cover of one semantics, or of its quick one and the
    smallest, sorted, their kernels loaded from one library."""
    configs = _configs(semantics, family, whole)
    shared_kernels.load(configs, semantics, arch)
    return configs


def _configs(semantics: Semantics, family: str, whole: bool = False) -> tuple[KernelConfig, ...]:
    cases = cover(family) if whole else quick_cover(family)
    found = {case.config for case in cases if case.semantics == semantics}
    return tuple(sorted(found | {_smallest(semantics, family)}))


for _semantics in QUICK_SEMANTICS:
    _quick = partial(_configs, _semantics, MMA_SYNC)
    shared_kernels.want_later(_quick, MMA_SYNC, _semantics, arch=80)
