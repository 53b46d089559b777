"""The wgmma_dq family (sm_90a): the gradient of q alone, for frozen k and v, with wgmma and TMA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families.backward_work import HELPER_TEMPLATES, helpers_ms
from flashsmith.families.block_lists import key_list_templates
from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import PAIRS, HeadDims
from flashsmith.families.tile_work import TileWork
from flashsmith.families.warpgroups import WarpgroupBackwardFamily
from flashsmith.families.wgmma_dq import cost, describe, rules, search_space, sets
from flashsmith.families.wgmma_dq.config import D_HEADS, WgmmaDqKernelConfig
from flashsmith.operations.problem import Problem
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.sizes import ONLY_DQ


class WgmmaDqFamily(WarpgroupBackwardFamily):
    """Kernels in which each consumer warpgroup has 64 queries and keeps their dq in registers over
    all keys, while another warpgroup copies keys by TMA."""

    config_class = WgmmaDqKernelConfig
    title = "wgmma dq"
    d_heads = D_HEADS
    pairs = PAIRS
    rules = rules.RULES
    choose_first = (
        "dtype", "d_head", "n_warpgroups", "B_r", "B_c", "k_stages", "v_stages", "late_dq",
        "consumer_registers", "producer_registers",
    )  # fmt: skip
    csrc = Path(__file__).parents[2] / "csrc" / "wgmma_dq"
    cpp = CppNames(
        config_header="wgmma_dq/config.cuh",
        kernel_header="wgmma_dq/dq_kernel.cuh",
        kernel="hopper_dq_kernel",
        static_config="StaticHopperDqKernelConfig",
        function="hopper_dq_kernel_fn",
        plan_header="wgmma_dq/plan.h",
        plan_function="plan_dq",
    )
    space_key = "hopper-dq"
    translation_seconds = 0.3
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "hopper-dq": ConfigSet(
            "the wgmma kernels of the gradient of q alone, for sm_90", sets.get_hopper_dq_configs
        ),
    }

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        return {"main": self.cpp.kernel, **HELPER_TEMPLATES}

    def program_templates(self, cfg: Any, semantics: Semantics) -> Mapping[str, str]:
        return key_list_templates(semantics)

    def gradients_of(self, cfg: WgmmaDqKernelConfig) -> str:
        return ONLY_DQ

    def unsupported_reason(self, problem: Problem, device: DeviceSpec) -> str | None:
        if problem.gradients != ONLY_DQ:
            return "it computes dq alone"
        return super().unsupported_reason(problem, device)

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[WgmmaDqKernelConfig]:
        return sets.candidates(dtype, d_head, device)

    def proven_configs(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec
    ) -> Sequence[WgmmaDqKernelConfig]:
        return sets.proof_configs(dtype, d_head, device)

    def search_space(
        self, dtype: DType, d_head: HeadDims, masked: bool
    ) -> Sequence[WgmmaDqKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def moves(self, cfg: WgmmaDqKernelConfig) -> Iterable[WgmmaDqKernelConfig]:
        return search_space.moves(cfg)

    def adapt_to_program(
        self, cfg: WgmmaDqKernelConfig, semantics: Semantics
    ) -> WgmmaDqKernelConfig:
        return cfg

    def compile_cost(self, cfg: WgmmaDqKernelConfig) -> float:
        return cost.COMPILE_COST

    def tile_work(
        self, cfg: Any, device: DeviceSpec, registers: int | None, spill: int | None
    ) -> TileWork:
        return cost.tile_work(cfg, device)

    def helpers_ms(self, cfg: Any, problem: Problem, device: DeviceSpec) -> float:
        return helpers_ms(problem, device, sums_dq=False)

    def smem_map(self, cfg: WgmmaDqKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: WgmmaDqKernelConfig) -> Intensity:
        return describe.intensity(cfg)


WGMMA_DQ = register_family(WgmmaDqFamily())
