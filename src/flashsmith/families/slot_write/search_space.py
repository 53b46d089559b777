"""The search space of the slot_write family."""

from __future__ import annotations

from flashsmith.families.head_dims import HeadDims, split_dims
from flashsmith.families.slot_write.config import SlotWriteKernelConfig
from flashsmith.semantics.dtype import DType


def search_space(dtype: DType, d_head: HeadDims) -> list[SlotWriteKernelConfig]:
    """Returns a config for each number of warps."""
    widths = split_dims({"dtype": dtype, "d_head": d_head})
    return [SlotWriteKernelConfig(**widths, n_warps=n_warps) for n_warps in (1, 2, 4, 8)]
