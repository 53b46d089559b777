"""The score_sums family (sm_80 and later): sums of the gradients of scores, with mma.sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import Family, register_family
from flashsmith.families.score_sums import cost, describe, rules, search_space, sets
from flashsmith.families.score_sums.config import TILE, ScoreSumsKernelConfig
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType


class ScoreSumsFamily(Family):
    """Kernels that recompute scores and their gradients in tiles of 64 queries by 64 keys and sum
    the gradients in registers."""

    config_class = ScoreSumsKernelConfig
    title = "sums of score gradients"
    operation = "score_gradients"
    rules = rules.RULES
    csrc = Path(__file__).parents[2] / "csrc" / "score_sums"
    cpp = CppNames(
        config_header="score_sums/config.cuh",
        kernel_header="score_sums/kernel.cuh",
        kernel="score_sums_kernel",
        static_config="StaticScoreSumsConfig",
        function="score_sums_kernel_fn",
        plan_header="score_sums/plan.h",
        plan_function="plan_score_sums",
    )
    translation_seconds = cost.TRANSLATION_SECONDS

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        return {"main": self.cpp.kernel, "prepare": "backward_prepare_kernel"}

    def candidates(
        self, dtype: DType, d_head: int, device: DeviceSpec, masked: bool
    ) -> Sequence[ScoreSumsKernelConfig]:
        return sets.candidates(dtype, d_head)

    def search_space(
        self, dtype: DType, d_head: int, masked: bool
    ) -> Sequence[ScoreSumsKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def proof_configs(self, dtype: DType, d: int) -> Sequence[Any]:
        d_heads = (d_head for d_head in self.knob_values["d_head"] if d <= d_head)
        return sets.candidates(dtype, min(d_heads))

    def adapt_to_program(
        self, cfg: ScoreSumsKernelConfig, semantics: Semantics
    ) -> ScoreSumsKernelConfig:
        return cfg

    def compile_cost(self, cfg: ScoreSumsKernelConfig) -> float:
        return cost.COMPILE_COST

    def dividing_tiles(self, cfg: ScoreSumsKernelConfig) -> dict[str, int]:
        return {"TILE": TILE}

    def registers_in_words(self, cfg: ScoreSumsKernelConfig, registers: int) -> str:
        return describe.registers_in_words(registers)


SCORE_SUMS = register_family(ScoreSumsFamily())
