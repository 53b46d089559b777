"""The search space of `flashsmith tune` for the wgmma_dq family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashsmith.families.device import device_spec
from flashsmith.families.head_dims import HeadDims
from flashsmith.families.search_steps import change_one_knob, with_neighbours
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma_dq.config import WgmmaDqKernelConfig
from flashsmith.families.wgmma_dq.sets import candidates, registers
from flashsmith.semantics.dtype import DType

# Knobs that the search does not change, because the problem or another knob determines them.
_FIXED = ("dtype", "d_head", "d_v", "B_r", "n_warpgroups")


def search_space(dtype: DType, d_head: HeadDims) -> list[WgmmaDqKernelConfig]:
    """The configs with which the search begins: the candidates, and all configs that are one step
    away from a candidate."""
    device = device_spec("H200")
    return with_neighbours(candidates(dtype, d_head, device), moves, device)


def moves(cfg: WgmmaDqKernelConfig) -> Iterator[WgmmaDqKernelConfig]:
    """The configs that differ from `cfg` in one knob or in the number of warpgroups."""
    yield from change_one_knob(cfg, _FIXED)
    for count in (1, 2, 3):
        producer, consumer = registers(count)
        yield replace(
            cfg,
            n_warpgroups=count,
            B_r=WARPGROUP_ROWS * count,
            producer_registers=producer,
            consumer_registers=consumer,
        )
