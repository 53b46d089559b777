"""The search space of `flashsmith tune` for the wgmma_backward family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashsmith.families.device import device_spec
from flashsmith.families.head_dims import HeadDims
from flashsmith.families.search_steps import change_one_knob, with_neighbours
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma_backward.config import WgmmaBackwardKernelConfig
from flashsmith.families.wgmma_backward.sets import (
    candidates,
    separate_configs,
    shared_configs,
)
from flashsmith.semantics.dtype import DType

# Knobs that the search does not change, because the problem or another knob determines them.
_FIXED = ("dtype", "d_head", "d_v", "cta_pair", "B_c", "n_warpgroups")


def search_space(dtype: DType, d_head: HeadDims) -> list[WgmmaBackwardKernelConfig]:
    """The configs with which the search begins: the candidates, the configs with separate_dq and
    shared_dq, and all configs that are one step away from any of these."""
    device = device_spec("H200")
    also = separate_configs(dtype, d_head) + shared_configs(dtype, d_head)
    first = [*candidates(dtype, d_head, device), *also]
    return with_neighbours(first, moves, device)


def moves(cfg: WgmmaBackwardKernelConfig) -> Iterator[WgmmaBackwardKernelConfig]:
    """The configs that differ from `cfg` in one knob or in the number of warpgroups."""
    yield from change_one_knob(cfg, _FIXED)
    for count, consumer_registers in ((1, 240), (2, 240), (3, 160)):
        yield replace(
            cfg,
            n_warpgroups=count,
            B_c=WARPGROUP_ROWS * count,
            consumer_registers=consumer_registers,
        )
