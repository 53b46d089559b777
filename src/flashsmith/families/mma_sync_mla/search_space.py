"""The steps of `flashsmith tune` in the mma_sync_mla family."""

from __future__ import annotations

from collections.abc import Iterator

from flashsmith.families.mma_sync_mla.config import MmaSyncMlaKernelConfig
from flashsmith.families.search_steps import change_one_knob

# Knobs that the search leaves alone, because the problem determines them.
_FIXED = ("dtype", "d_head", "d_v", "cache")


def moves(cfg: MmaSyncMlaKernelConfig) -> Iterator[MmaSyncMlaKernelConfig]:
    """The configs that differ from `cfg` in one knob."""
    return change_one_knob(cfg, _FIXED)
