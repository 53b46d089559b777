"""The search space of `flashsmith tune` for the mma_sync_decode family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from flashsmith.families.device import KNOWN_DEVICES
from flashsmith.families.head_dims import HeadDims, split_dims
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync_decode.config import FlashDecodeKernelConfig
from flashsmith.families.search_steps import change_one_knob
from flashsmith.semantics.dtype import DType

# The knob values with which the search begins. A tile of 16 rows has room for one query of all
# heads of a group, if the group has at most 16 heads.
_KNOBS: dict[str, tuple[Any, ...]] = {
    "B_r": (16,),
    "B_c": (32, 64, 128),
    "n_warps": (4,),
    "stages": (2, 3, 4),
    "min_keys": (128, 256),
    "parts_per_sm": (1, 2, 4),
}
# Knobs that the search leaves alone, because the problem determines them.
_FIXED = ("dtype", "d_head", "d_v", "chunk_rows", "cache")
_ROOMIEST = max(KNOWN_DEVICES, key=lambda device: device.max_smem_per_block)


def search_space(dtype: DType, d_head: HeadDims) -> list[FlashDecodeKernelConfig]:
    """All combinations of the initial knob values that are legal on the known device with the most
    shared memory."""
    widths = split_dims({"dtype": dtype, "d_head": d_head})
    configs = (
        FlashDecodeKernelConfig(**widths, **dict(zip(_KNOBS, values, strict=True)))
        for values in product(*_KNOBS.values())
    )
    return [cfg for cfg in configs if is_legal(cfg, _ROOMIEST)]


def moves(cfg: FlashDecodeKernelConfig) -> Iterator[FlashDecodeKernelConfig]:
    """The configs that differ from `cfg` in one knob, the configs that differ in both B_c and
    n_warps, and the configs with own_rows."""
    yield from change_one_knob(cfg, _FIXED)
    if not cfg.own_rows:
        for keys in (32, 64):
            yield replace(cfg, B_r=32, B_c=keys, n_warps=2, full_tiles=False, own_rows=True)
    for factor in (0.5, 2):
        yield replace(cfg, B_c=int(cfg.B_c * factor), n_warps=int(cfg.n_warps * factor))
