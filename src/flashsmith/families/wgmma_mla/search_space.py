"""The steps of `flashsmith tune` in the wgmma_mla family."""

from __future__ import annotations

from collections.abc import Iterator

from flashsmith.families.search_steps import change_one_knob
from flashsmith.families.wgmma_mla.config import WgmmaMlaKernelConfig

# Knobs that the search does not change, because the problem or the kernels determine them.
_FIXED = ("dtype", "d_head", "producer_registers", "consumer_registers", "d_v")


def moves(cfg: WgmmaMlaKernelConfig) -> Iterator[WgmmaMlaKernelConfig]:
    """The configs that differ from `cfg` in one knob."""
    return change_one_knob(cfg, _FIXED)
