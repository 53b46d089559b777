"""The row_merge family (sm_80 and later): merges attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import Family, register_family
from flashsmith.families.row_merge import cost, describe, rules, search_space, sets
from flashsmith.families.row_merge.config import RowMergeKernelConfig
from flashsmith.semantics.dtype import DType


class RowMergeFamily(Family):
    """Kernels that sum the parts of a row in the order in which the caller passes the parts. Memory
    bandwidth limits the speed of these kernels."""

    config_class = RowMergeKernelConfig
    title = "merge"
    operation = "merge"
    rules = rules.RULES
    csrc = Path(__file__).parents[2] / "csrc" / "row_merge"
    cpp = CppNames(
        config_header="row_merge/config.cuh",
        kernel_header="row_merge/kernel.cuh",
        kernel="row_merge_kernel",
        static_config="StaticRowMergeConfig",
        function="row_merge_kernel_fn",
        plan_header="row_merge/plan.h",
        plan_function="plan_row_merge",
    )
    translation_seconds = cost.TRANSLATION_SECONDS

    def candidates(
        self, dtype: DType, d_head: int, device: DeviceSpec, masked: bool
    ) -> Sequence[RowMergeKernelConfig]:
        return sets.candidates(dtype, d_head)

    def search_space(
        self, dtype: DType, d_head: int, masked: bool
    ) -> Sequence[RowMergeKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def proof_configs(self, dtype: DType, d: int) -> Sequence[Any]:
        d_heads = (d_head for d_head in self.knob_values["d_head"] if d <= d_head)
        return sets.candidates(dtype, min(d_heads))

    def compile_cost(self, cfg: RowMergeKernelConfig) -> float:
        return cost.COMPILE_COST

    def registers_in_words(self, cfg: RowMergeKernelConfig, registers: int) -> str:
        return describe.registers_in_words(registers)


ROW_MERGE = register_family(RowMergeFamily())
