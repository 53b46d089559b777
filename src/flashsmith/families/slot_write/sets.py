"""The config of the slot_write family that is chosen when there are no measurements."""

from __future__ import annotations

from flashsmith.families.head_dims import HeadDims, split_dims
from flashsmith.families.slot_write.config import SlotWriteKernelConfig
from flashsmith.semantics.dtype import DType


def candidates(dtype: DType, d_head: HeadDims) -> list[SlotWriteKernelConfig]:
    """Returns a single config with 4 warps. Its CTAs are so small that even a few rows are spread
    over many SMs, but 16 of them fill an SM."""
    return [SlotWriteKernelConfig(**split_dims({"dtype": dtype, "d_head": d_head}), n_warps=4)]
