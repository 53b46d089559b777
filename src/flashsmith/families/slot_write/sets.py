"""The config of the slot_write family that is chosen when there are no measurements."""

from __future__ import annotations

from flashsmith.families.head_dims import HeadDims, split_dims
from flashsmith.families.slot_write.config import SlotWriteKernelConfig
from flashsmith.semantics.dtype import DType


def candidates(dtype: DType, d_head: HeadDims) -> list[SlotWriteKernelConfig]:
    """One config with 4 warps, with which even a few rows are spread over many SMs, while 16 CTAs
    fill an SM."""
    return [SlotWriteKernelConfig(**split_dims({"dtype": dtype, "d_head": d_head}), n_warps=4)]
