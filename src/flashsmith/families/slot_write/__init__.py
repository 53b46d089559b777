"""The slot_write family (sm_80 and later): copies rows of k and v to slots of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import Family, register_family
from flashsmith.families.head_dims import PAIRS, HeadDims, HeadPair
from flashsmith.families.slot_write import cost, describe, rules, search_space, sets
from flashsmith.families.slot_write.config import SlotWriteKernelConfig
from flashsmith.operations.problem import Problem
from flashsmith.semantics.dtype import DType


class SlotWriteFamily(Family):
    """Kernels that only copy rows, whose speed memory bandwidth limits."""

    config_class = SlotWriteKernelConfig
    title = "cache writes"
    pairs = PAIRS
    operation = "write_slots"
    rules = rules.RULES
    csrc = Path(__file__).parents[2] / "csrc" / "slot_write"
    cpp = CppNames(
        config_header="slot_write/config.cuh",
        kernel_header="slot_write/kernel.cuh",
        kernel="slot_write_kernel",
        static_config="StaticSlotWriteConfig",
        function="slot_write_kernel_fn",
        plan_header="slot_write/plan.h",
        plan_function="plan_slot_write",
    )
    translation_seconds = cost.TRANSLATION_SECONDS

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[SlotWriteKernelConfig]:
        return sets.candidates(dtype, d_head)

    def search_space(
        self, dtype: DType, d_head: HeadDims, masked: bool
    ) -> Sequence[SlotWriteKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        if isinstance(d, HeadPair):
            return sets.candidates(dtype, d)
        d_heads = (d_head for d_head in self.knob_values["d_head"] if d <= d_head)
        return sets.candidates(dtype, min(d_heads))

    def cache_of(self, cfg: SlotWriteKernelConfig) -> str:
        return cfg.cache.label

    def has_more_arguments(self, cfg: SlotWriteKernelConfig) -> bool:
        return bool(cfg.cache)

    def adapt_to_queries(
        self, cfg: SlotWriteKernelConfig, problem: Problem, device: DeviceSpec
    ) -> SlotWriteKernelConfig:
        return replace(cfg, cache=problem.cache_format)

    def compile_cost(self, cfg: SlotWriteKernelConfig) -> float:
        return cost.COMPILE_COST

    def registers_in_words(self, cfg: SlotWriteKernelConfig, registers: int) -> str:
        return describe.registers_in_words(registers)


SLOT_WRITE = register_family(SlotWriteFamily())
