"""Which configs of the row_merge family kernels can be built for."""

from __future__ import annotations

from flashsmith.families.row_merge.config import RowMergeKernelConfig
from flashsmith.families.rule import Rule, supported

RULES: tuple[Rule, ...] = (
    supported(RowMergeKernelConfig, "d_head"),
    supported(RowMergeKernelConfig, "n_warps"),
)
