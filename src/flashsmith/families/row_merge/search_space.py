"""The search space of the row_merge family."""

from __future__ import annotations

from flashsmith.families.row_merge.config import RowMergeKernelConfig
from flashsmith.semantics.dtype import DType


def search_space(dtype: DType, d_head: int) -> list[RowMergeKernelConfig]:
    """Returns a config for each number of warps."""
    return [RowMergeKernelConfig(dtype, d_head, n_warps) for n_warps in (1, 2, 4, 8)]
