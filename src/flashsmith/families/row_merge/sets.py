"""The sets of the row_merge family: what is chosen where nothing was measured."""

from __future__ import annotations

from flashsmith.families.row_merge.config import RowMergeKernelConfig
from flashsmith.semantics.dtype import DType


def candidates(dtype: DType, d_head: int) -> list[RowMergeKernelConfig]:
    """Of 4 warps: small enough for few rows to spread over SMs, and 16 CTAs fill an SM."""
    return [RowMergeKernelConfig(dtype, d_head, 4)]
