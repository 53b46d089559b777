"""Which configs are candidates for a problem: the documented place where a search space begins."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from flashsmith.chooser.candidates import mma_sync_candidates
from flashsmith.chooser.evidence import gather
from flashsmith.chooser.winners import WinnersTable
from flashsmith.errors import SelectionError
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    compiled_d_head,
    get_kernel_configs,
    get_search_space_configs,
)
from flashsmith.families.wgmma.rules import HOPPER_ARCH
from flashsmith.families.wgmma.space import SHAPES, get_hopper_space_configs

MMA_SYNC, WGMMA, BOTH = "space", "hopper", "both"
# The keys of search spaces, whose best are worth refining.
SPACES = (MMA_SYNC, WGMMA, BOTH)
_FEW = 8
# Sets that say how to schedule, whatever the dtype and the head dimension; 'B_r,B_c' is of tune.
_SCHEDULES = re.compile(r"tune|prog|prog-all|all|\s*\d+\s*,\s*\d+\s*", re.ASCII)


def default_space(device: DeviceSpec) -> str:
    """The key of the space that is searched on a device unless another is asked for."""
    return BOTH if device.arch == HOPPER_ARCH else MMA_SYNC


def search_space(
    problem: Problem, device: DeviceSpec, key: str | None = None
) -> list[KernelConfig]:
    """The configs that may serve `problem` on `device`, each once; some may turn out illegal there.

    `key` is 'space' (the mma.sync family's), 'hopper' (the wgmma family's), 'both' (the wgmma
    family's, and of mma.sync a few, those of the shipped tables first), None for
    default_space(), or a KERNELS key. A space is searched at the problem's own dtype and head
    dimension, and so are tune, its block sizes ('64,32'), prog, prog-all and all, whose configs get
    them put in. Of any other set those count that have them already.

    Raises:
        SelectionError: the key is unknown or selects nothing, or none of its configs has the
            problem's dtype and head dimension.
        ArgumentError: no kernel is made for the problem's d.
    """
    key = key or default_space(device)
    d_head = compiled_d_head(problem.d)
    if key == MMA_SYNC:
        return list(get_search_space_configs((problem.dtype,), (d_head,)))
    if key == WGMMA:
        return _of_wgmma(problem, d_head)
    if key == BOTH:
        wgmma = _of_wgmma(problem, d_head) if d_head in SHAPES else []
        return [*wgmma, *_few_of_mma_sync(problem, device)]
    configs = get_kernel_configs(key)
    if _SCHEDULES.fullmatch(key):
        configs = [replace(cfg, dtype=problem.dtype, d_head=d_head) for cfg in configs]
    fitting = [cfg for cfg in configs if (cfg.dtype, cfg.d_head) == (problem.dtype, d_head)]
    if not fitting:
        raise SelectionError(
            f"space={key!r}: none of its configs ({len(configs)}) is for {problem.dtype.name} and "
            f"d_head {d_head}, which {problem} needs; leave the problem out, or take another space"
        )
    return list(dict.fromkeys(fitting))


def _few_of_mma_sync(problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """What says how the family stands to the other: its own search is for another sweep."""
    evidence = gather(problem, device, _shipped(), "mma_sync")
    measured = [one.config for one in evidence.expected]
    sound = mma_sync_candidates(problem.dtype, compiled_d_head(problem.d), device)
    return list(dict.fromkeys([*measured, *sound]))[:_FEW]


@lru_cache(maxsize=1)
def _shipped() -> WinnersTable:
    # The user's own changes while a sweep runs, and what it goes on with must not.
    return WinnersTable.shipped()


def _of_wgmma(problem: Problem, d_head: int) -> list[KernelConfig]:
    masked = problem.semantics.mask != "none"
    found = get_hopper_space_configs((problem.dtype,), (d_head,), masked)
    if not found:
        raise SelectionError(
            f"space={WGMMA!r}: the wgmma family has no kernels of d_head {d_head}, which {problem} "
            f"needs; leave the problem out, or take space={MMA_SYNC!r}"
        )
    return list(found)
