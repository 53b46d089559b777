"""The wgmma_mla family (sm_90a): attention over a latent cache with wgmma and TMA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families import latent
from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import HeadDims
from flashsmith.families.order import Order
from flashsmith.families.tile_work import CallWork
from flashsmith.families.warpgroups import WarpgroupFamily
from flashsmith.families.wgmma_mla import cost, describe, rules, search_space, sets
from flashsmith.families.wgmma_mla.config import WgmmaMlaKernelConfig
from flashsmith.operations.problem import Problem
from flashsmith.semantics.dtype import DType


class WgmmaMlaFamily(WarpgroupFamily):
    """Kernels in which two warpgroups share the columns of O for 64 query rows, and take turns at
    the blocks of keys."""

    config_class = WgmmaMlaKernelConfig
    title = "wgmma latent"
    operation = "latent_decode"
    rules = rules.RULES
    choose_first = ("dtype", "d_head", "d_v", "consumer_registers", "producer_registers")
    csrc = Path(__file__).parents[2] / "csrc" / "wgmma_mla"
    cpp = CppNames(
        config_header="wgmma_mla/config.cuh",
        kernel_header="wgmma_mla/kernels.cuh",
        kernel="mla_kernel",
        static_config="StaticMlaConfig",
        function="mla_kernel_fn",
        plan_header="wgmma_mla/plan.h",
        plan_function="plan_mla",
    )
    has_cost_model = True
    space_key = "latent"
    pairs = latent.PAIRS
    translation_seconds = cost.TRANSLATION_SECONDS
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "latent": ConfigSet("kernels of attention over a latent cache", sets.get_mla_configs),
    }

    @property
    def covered_values(self) -> Mapping[str, tuple[Any, ...]]:
        # Every kernel has a d_v.
        return self.knob_values

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        return {"main": self.cpp.kernel, "merge": "mla_merge_kernel", "append": "mla_append_kernel"}

    def unsupported_reason(self, problem: Problem, device: DeviceSpec) -> str | None:
        arch = super().unsupported_reason(problem, device)
        return latent.unsupported_reason(problem) if arch is None else arch

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[WgmmaMlaKernelConfig]:
        return sets.candidates(dtype, d_head, device)

    def search_space(
        self, dtype: DType, d_head: HeadDims, masked: bool
    ) -> Sequence[WgmmaMlaKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def moves(self, cfg: WgmmaMlaKernelConfig) -> Iterable[WgmmaMlaKernelConfig]:
        return search_space.moves(cfg)

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        return sets.proof_configs(dtype, d, self.roomiest_device)

    def order(self, cfg: WgmmaMlaKernelConfig, arch: int) -> Order:
        return describe.order(cfg, arch)

    def compile_cost(self, cfg: WgmmaMlaKernelConfig) -> float:
        return cost.COMPILE_COST

    def call_work(self, cfg: Any, problem: Problem, device: DeviceSpec) -> CallWork:
        return cost.work(cfg, problem, device)

    def smem_map(self, cfg: WgmmaMlaKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: WgmmaMlaKernelConfig) -> Intensity:
        return describe.intensity(cfg)


WGMMA_MLA = register_family(WgmmaMlaFamily())
