"""The config of the row_merge family that is chosen when there are no measurements."""

from __future__ import annotations

from flashsmith.families.row_merge.config import RowMergeKernelConfig
from flashsmith.semantics.dtype import DType


def candidates(dtype: DType, d_head: int) -> list[RowMergeKernelConfig]:
    """One config with 4 warps, with which even a few rows are spread over many SMs, while 16 CTAs
    fill an SM."""
    return [RowMergeKernelConfig(dtype, d_head, 4)]
