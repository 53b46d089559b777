"""The wgmma_mla family (sm_90a): attention over a latent cache with wgmma and TMA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import HeadDims
from flashsmith.families.latent import LatentFamily
from flashsmith.families.order import Order
from flashsmith.families.tile_work import CallWork
from flashsmith.families.warpgroups import WarpgroupFamily
from flashsmith.families.wgmma_mla import cost, describe, rules, search_space, sets
from flashsmith.families.wgmma_mla.config import WgmmaMlaKernelConfig
from flashsmith.operations.problem import Problem
from flashsmith.semantics.dtype import DType


class WgmmaMlaFamily(LatentFamily, WarpgroupFamily):
    """Kernels in which two warpgroups share the columns of O for 64 query rows and compute the
    scores of the blocks of keys alternately."""

    config_class = WgmmaMlaKernelConfig
    title = "wgmma latent"
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
    space_key = "latent"
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "latent": ConfigSet("kernels of attention over a latent cache", sets.get_mla_configs),
    }

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[WgmmaMlaKernelConfig]:
        return sets.candidates(dtype, d_head, device)

    def moves(self, cfg: WgmmaMlaKernelConfig) -> Iterable[WgmmaMlaKernelConfig]:
        return search_space.moves(cfg)

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        return sets.proof_configs(dtype, d, self.roomiest_device)

    def order(self, cfg: WgmmaMlaKernelConfig, arch: int) -> Order:
        return describe.order(cfg, arch)

    def call_work(self, cfg: Any, problem: Problem, device: DeviceSpec) -> CallWork:
        return cost.work(cfg, problem, device)

    def smem_map(self, cfg: WgmmaMlaKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: WgmmaMlaKernelConfig) -> Intensity:
        return describe.intensity(cfg)


WGMMA_MLA = register_family(WgmmaMlaFamily())
