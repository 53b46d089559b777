"""The mma_sync_mla family (sm_80 and later): attention over a latent cache with mma.sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families import latent
from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Family, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import HeadDims
from flashsmith.families.mma_sync_mla import cost, describe, rules, search_space, sets
from flashsmith.families.mma_sync_mla.config import MmaSyncMlaKernelConfig
from flashsmith.families.order import Order
from flashsmith.families.tile_work import CallWork
from flashsmith.operations.problem import Problem
from flashsmith.semantics.dtype import DType


class MmaSyncMlaFamily(Family):
    """Kernels whose CTAs have 16 query rows, for few query heads and for GPUs without wgmma."""

    config_class = MmaSyncMlaKernelConfig
    title = "mma.sync latent"
    operation = "latent_decode"
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
    must_not_spill = True
    has_cost_model = True
    space_key = "latent-mma"
    pairs = latent.PAIRS
    translation_seconds = cost.TRANSLATION_SECONDS
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "latent-mma": ConfigSet(
            "kernels of attention over a latent cache, for few heads or older GPUs",
            sets.get_mla_configs,
        ),
    }

    @property
    def covered_values(self) -> Mapping[str, tuple[Any, ...]]:
        # Every kernel has a d_v.
        return self.knob_values

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        return {"main": self.cpp.kernel, "merge": "mla_merge_kernel", "append": "mla_append_kernel"}

    def unsupported_reason(self, problem: Problem, device: DeviceSpec) -> str | None:
        return latent.unsupported_reason(problem)

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[MmaSyncMlaKernelConfig]:
        return sets.candidates(dtype, d_head, device)

    def search_space(
        self, dtype: DType, d_head: HeadDims, masked: bool
    ) -> Sequence[MmaSyncMlaKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def moves(self, cfg: MmaSyncMlaKernelConfig) -> Iterable[MmaSyncMlaKernelConfig]:
        return search_space.moves(cfg)

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        return sets.proof_configs(dtype, d, self.roomiest_device)

    def order(self, cfg: MmaSyncMlaKernelConfig, arch: int) -> Order:
        return describe.order(cfg, arch)

    def compile_cost(self, cfg: MmaSyncMlaKernelConfig) -> float:
        return cost.COMPILE_COST

    def call_work(self, cfg: Any, problem: Problem, device: DeviceSpec) -> CallWork:
        return cost.work(cfg, problem, device)

    def smem_map(self, cfg: MmaSyncMlaKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: MmaSyncMlaKernelConfig) -> Intensity:
        return describe.intensity(cfg)

    def conflict_kinds(self) -> Mapping[str, tuple[str, ...]]:
        return describe.CONFLICT_KINDS


MMA_SYNC_MLA = register_family(MmaSyncMlaFamily())
