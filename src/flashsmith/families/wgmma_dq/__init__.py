"""The wgmma_dq family (sm_90a): the gradient of q alone, where k and v are frozen, by wgmma and
TMA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families.backward_work import helpers_ms
from flashsmith.families.cpp import Cpp
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Intensity, SmemRegion, register_family
from flashsmith.families.legality import compiled_d_head
from flashsmith.families.tile_work import TileWork
from flashsmith.families.warpgroups import WarpgroupFamily
from flashsmith.families.wgmma_dq import cost, describe, rules, search_space, sets
from flashsmith.families.wgmma_dq.config import D_HEADS, HopperDqKernelConfig
from flashsmith.operations.dtype import DType
from flashsmith.operations.problem import Problem
from flashsmith.operations.sizes import ONLY_DQ


class WgmmaDqFamily(WarpgroupFamily):
    """Kernels of warpgroups with 64 queries each, whose dq stays in registers over all keys; one
    more copies keys by TMA."""

    config_class = HopperDqKernelConfig
    title = "wgmma dq"
    operation = "backward"
    rules = rules.RULES
    settled_first = (
        "dtype", "d_head", "n_warpgroups", "B_r", "B_c", "k_stages", "v_stages", "late_dq",
        "consumer_registers", "producer_registers",
    )  # fmt: skip
    repairs: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # Of the producer's registers only fewer can help, and fewer than these it cannot do with.
        "producer_registers": (24, 32, 40),
    }
    csrc = Path(__file__).parents[2] / "csrc" / "wgmma_dq"
    cpp = Cpp(
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
        return {
            "main": self.cpp.kernel,
            "prepare": "backward_prepare_kernel",
            "gaps": "backward_gaps_kernel",
            "sinks": "backward_sinks_kernel",
        }

    def gradients_of(self, cfg: HopperDqKernelConfig) -> str:
        return ONLY_DQ

    def unserved(self, problem: Problem, device: DeviceSpec) -> str | None:
        if problem.gradients != ONLY_DQ:
            return "it computes dq alone"
        d_head = compiled_d_head(problem.d)
        arch = super().unserved(problem, device)
        if arch is None and d_head not in D_HEADS:
            served = ", ".join(map(str, D_HEADS))
            return f"it has kernels of d_head {served}, and d = {problem.d} runs on {d_head}"
        return arch

    def candidates(
        self, dtype: DType, d_head: int, device: DeviceSpec, masked: bool
    ) -> Sequence[HopperDqKernelConfig]:
        return sets.candidates(dtype, d_head, device)

    def search_space(
        self, dtype: DType, d_head: int, masked: bool
    ) -> Sequence[HopperDqKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def moved(self, cfg: HopperDqKernelConfig) -> Iterable[HopperDqKernelConfig]:
        return search_space.moved(cfg)

    def proof_configs(self, dtype: DType, d: int) -> Sequence[Any]:
        d_heads = [d_head for d_head in D_HEADS if d <= d_head]
        return sets.candidates(dtype, d_heads[0], self.roomiest_device) if d_heads else ()

    has_cost_model = True

    def compile_cost(self, cfg: HopperDqKernelConfig) -> float:
        return cost.COMPILE_COST

    def tile_work(
        self, cfg: Any, device: DeviceSpec, registers: int | None, spill: int | None
    ) -> TileWork:
        return cost.tile_work(cfg, device)

    def helpers_ms(self, cfg: Any, problem: Problem, device: DeviceSpec) -> float:
        return helpers_ms(problem, device, sums_dq=False)

    def dividing_tiles(self, cfg: HopperDqKernelConfig) -> dict[str, int]:
        return {"B_r": cfg.B_r, "B_c": cfg.B_c}

    def smem_map(self, cfg: HopperDqKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: HopperDqKernelConfig) -> Intensity:
        return describe.intensity(cfg)


WGMMA_DQ = register_family(WgmmaDqFamily())
