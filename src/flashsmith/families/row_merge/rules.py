"""The rules of the row_merge family: for which configs kernels can be built."""

from __future__ import annotations

from flashsmith.families.row_merge.config import RowMergeKernelConfig
from flashsmith.families.rule import Rule, supported

RULES: tuple[Rule, ...] = (
    supported(RowMergeKernelConfig, "d_head"),
    supported(RowMergeKernelConfig, "n_warps"),
)
