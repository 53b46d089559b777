"""The config of the slot_write family that is chosen if nothing was measured."""

from __future__ import annotations

from flashsmith.families.slot_write.config import SlotWriteKernelConfig
from flashsmith.semantics.dtype import DType


def candidates(dtype: DType, d_head: int) -> list[SlotWriteKernelConfig]:
    """One config with 4 warps: few rows are still spread over SMs, and 16 CTAs fill an SM."""
    return [SlotWriteKernelConfig(dtype, d_head, 4)]
