"""The mma_sync_mla family (sm_80 and later): attention over a latent cache with mma.sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import HeadDims
from flashsmith.families.latent import LatentFamily
from flashsmith.families.mma_sync_mla import cost, describe, rules, search_space, sets
from flashsmith.families.mma_sync_mla.config import MmaSyncMlaKernelConfig
from flashsmith.families.order import Order
from flashsmith.families.tile_work import CallWork
from flashsmith.operations.problem import Problem
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType


class MmaSyncMlaFamily(LatentFamily):
    """Kernels in which each CTA computes 16 query rows. They are for calls with few query heads and
    for GPUs without wgmma."""

    config_class = MmaSyncMlaKernelConfig
    title = "mma.sync latent"
    rules = rules.RULES
    choose_first = ("dtype", "d_head", "d_v", "B_c", "stages")
    csrc = Path(__file__).parents[2] / "csrc" / "mma_sync_mla"
    cpp = CppNames(
        config_header="mma_sync_mla/config.cuh",
        kernel_header="mma_sync_mla/kernels.cuh",
        kernel="mma_sync_mla_kernel",
        static_config="StaticMmaSyncMlaConfig",
        function="mla_kernel_fn",
        plan_header="mma_sync_mla/plan.h",
        plan_function="plan_mma_sync_mla",
    )
    serves_scales = True
    space_key = "latent-mma"
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "latent-mma": ConfigSet(
            "kernels of attention over a latent cache, for few heads or older GPUs",
            sets.get_mla_configs,
        ),
    }

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[MmaSyncMlaKernelConfig]:
        return sets.candidates(dtype, d_head, device)

    def moves(self, cfg: MmaSyncMlaKernelConfig) -> Iterable[MmaSyncMlaKernelConfig]:
        return search_space.moves(cfg)

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        return sets.proof_configs(dtype, d, self.roomiest_device)

    def cache_of(self, cfg: MmaSyncMlaKernelConfig) -> str:
        return cfg.cache.label

    def has_more_arguments(self, cfg: MmaSyncMlaKernelConfig) -> bool:
        return bool(cfg.cache)

    def adapt_to_program(
        self, cfg: MmaSyncMlaKernelConfig, semantics: Semantics
    ) -> MmaSyncMlaKernelConfig:
        return cfg

    def adapt_to_queries(
        self, cfg: MmaSyncMlaKernelConfig, problem: Problem, device: DeviceSpec
    ) -> MmaSyncMlaKernelConfig:
        return sets.over_cache(cfg, problem.cache_format, device)

    def order(self, cfg: MmaSyncMlaKernelConfig, arch: int) -> Order:
        return describe.order(cfg, arch)

    def call_work(self, cfg: Any, problem: Problem, device: DeviceSpec) -> CallWork:
        return cost.work(cfg, problem, device)

    def smem_map(self, cfg: MmaSyncMlaKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: MmaSyncMlaKernelConfig) -> Intensity:
        return describe.intensity(cfg)

    def conflict_kinds(self) -> Mapping[str, tuple[str, ...]]:
        return describe.CONFLICT_KINDS


MMA_SYNC_MLA = register_family(MmaSyncMlaFamily())
