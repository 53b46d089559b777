"""The search space of `flashsmith tune` for the mma_sync_backward family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from flashsmith.families.device import KNOWN_DEVICES
from flashsmith.families.head_dims import HeadDims, split_dims
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync_backward.config import DqMode, FlashBackwardKernelConfig
from flashsmith.families.search_steps import change_one_knob
from flashsmith.semantics.dtype import DType

# The knob values with which the search begins: the larger legal tiles, with both ways of summing
# dq.
_KNOBS: dict[str, tuple[int, ...]] = {
    "B_r": (32, 64),
    "B_c": (64, 128),
    "n_warps": (4, 8),
    "column_warps": (1, 2),
    "stages": (1, 2),
    "dq": tuple(DqMode),
}
# Knobs that the search leaves alone, because the problem determines them.
_FIXED = ("dtype", "d_head", "d_v")
_ROOMIEST = max(KNOWN_DEVICES, key=lambda device: device.max_smem_per_block)


def search_space(dtype: DType, d_head: HeadDims) -> list[FlashBackwardKernelConfig]:
    """All combinations of the initial knob values that are legal on the known device with the most
    shared memory."""
    fixed = split_dims({"dtype": dtype, "d_head": d_head})
    configs = (
        FlashBackwardKernelConfig(**fixed, **dict(zip(_KNOBS, values, strict=True)))  # type: ignore[arg-type]
        for values in product(*_KNOBS.values())
    )
    return [cfg for cfg in configs if is_legal(cfg, _ROOMIEST)]


def moves(cfg: FlashBackwardKernelConfig) -> Iterator[FlashBackwardKernelConfig]:
    """The configs that differ from `cfg` in one knob, or in B_c and n_warps together."""
    yield from change_one_knob(cfg, _FIXED)
    for B_c, n_warps in ((64, 4), (64, 8), (128, 8)):
        yield replace(cfg, B_c=B_c, n_warps=n_warps)
