"""The search space of `flashsmith tune` for the wgmma_dq family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from flashsmith.families.device import device_spec
from flashsmith.families.legality import is_legal
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma_dq.config import WgmmaDqKernelConfig
from flashsmith.families.wgmma_dq.sets import candidates, registers
from flashsmith.semantics.dtype import DType

# Knobs that the search does not change, because the problem or another knob determines them.
_FIXED = ("dtype", "d_head", "B_r", "n_warpgroups")


def search_space(dtype: DType, d_head: int) -> list[WgmmaDqKernelConfig]:
    """The first configs of the search: the candidates, and all configs that are one step away from
    them."""
    device = device_spec("H200")
    first = candidates(dtype, d_head, device)
    found = dict.fromkeys([*first, *(other for cfg in first for other in moves(cfg))])
    return [cfg for cfg in found if is_legal(cfg, device)]


def moves(cfg: WgmmaDqKernelConfig) -> Iterator[WgmmaDqKernelConfig]:
    """The configs in which one knob, or the number of warpgroups, has another value."""
    for knob in fields(cfg):
        if knob.name not in _FIXED:
            for value in knob.metadata["values"]:
                yield replace(cfg, **{knob.name: value})
    for count in (1, 2, 3):
        producer, consumer = registers(count)
        yield replace(
            cfg,
            n_warpgroups=count,
            B_r=WARPGROUP_ROWS * count,
            producer_registers=producer,
            consumer_registers=consumer,
        )
