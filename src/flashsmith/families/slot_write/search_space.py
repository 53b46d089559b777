"""The search space of the slot_write family."""

from __future__ import annotations

from flashsmith.families.slot_write.config import SlotWriteKernelConfig
from flashsmith.semantics.dtype import DType


def search_space(dtype: DType, d_head: int) -> list[SlotWriteKernelConfig]:
    """A config for each number of warps."""
    return [SlotWriteKernelConfig(dtype, d_head, n_warps) for n_warps in (1, 2, 4, 8)]
