"""The mma_sync_backward family (sm_80 and later): gradients of attention with mma.sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families.backward_work import HELPER_TEMPLATES, helpers_ms
from flashsmith.families.block_lists import key_list_templates, query_list_templates
from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Family, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import PAIRS, HeadDims, HeadPair
from flashsmith.families.mma_sync_backward import cost, describe, rules, search_space, sets
from flashsmith.families.mma_sync_backward.config import DqMode, FlashBackwardKernelConfig
from flashsmith.families.tile_work import TileWork
from flashsmith.operations.problem import Problem
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.sizes import NO_DQ, ONLY_DQ


class MmaSyncBackwardFamily(Family):
    """Kernels in which each CTA computes a block of keys; warps multiply with mma.sync and copy
    operands with cp.async."""

    config_class = FlashBackwardKernelConfig
    title = "mma.sync backward"
    operation = "backward"
    rules = rules.RULES
    choose_first = ("dtype", "d_head", "n_warps", "column_warps", "B_c", "B_r", "stages", "dq")
    csrc = Path(__file__).parents[2] / "csrc" / "mma_sync_backward"
    cpp = CppNames(
        config_header="mma_sync_backward/config.cuh",
        kernel_header="mma_sync_backward/backward_kernel.cuh",
        kernel="flash_backward_kernel",
        static_config="StaticBackwardKernelConfig",
        function="backward_kernel_fn",
        plan_header="mma_sync_backward/plan.h",
        plan_function="plan_backward",
    )
    pairs = PAIRS
    space_key = "backward"
    translation_seconds = 0.5
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "backward": ConfigSet("kernels of the backward pass", sets.get_backward_configs),
    }

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        queries = {"finish": "backward_finish_kernel"}
        if cfg.dq == DqMode.TWO_KERNELS:
            queries = {"queries": "backward_queries_kernel"}
        return {"main": self.cpp.kernel, **queries, **HELPER_TEMPLATES}

    def program_templates(self, cfg: Any, semantics: Semantics) -> Mapping[str, str]:
        lists = query_list_templates(semantics)
        if cfg.dq == DqMode.TWO_KERNELS:
            return {**lists, **key_list_templates(semantics)}
        return lists

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[FlashBackwardKernelConfig]:
        return sets.candidates(dtype, d_head, device)

    def search_space(
        self, dtype: DType, d_head: HeadDims, masked: bool
    ) -> Sequence[FlashBackwardKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def moves(self, cfg: FlashBackwardKernelConfig) -> Iterable[FlashBackwardKernelConfig]:
        return search_space.moves(cfg)

    def is_deterministic(self, cfg: FlashBackwardKernelConfig) -> bool:
        return cfg.dq == DqMode.TWO_KERNELS

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        if isinstance(d, HeadPair):
            return sets.candidates(dtype, d, self.roomiest_device)
        d_heads = (d_head for d_head in self.knob_values["d_head"] if d <= d_head)
        return sets.candidates(dtype, min(d_heads), self.roomiest_device)

    has_cost_model = True

    def adapt_to_program(
        self, cfg: FlashBackwardKernelConfig, semantics: Semantics
    ) -> FlashBackwardKernelConfig:
        return cfg

    def compile_cost(self, cfg: FlashBackwardKernelConfig) -> float:
        return cost.compile_cost(cfg)

    def tile_work(
        self, cfg: Any, device: DeviceSpec, registers: int | None, spill: int | None
    ) -> TileWork:
        return cost.tile_work(cfg, device, registers)

    def loops(
        self,
        cfg: Any,
        problem: Problem,
        device: DeviceSpec,
        registers: int | None = None,
        spill: int | None = None,
    ) -> Sequence[TileWork]:
        needed = problem.gradients
        keys = cost.tile_work(cfg, device, registers, needed)
        if cfg.dq == DqMode.ATOMICS or needed == NO_DQ:
            return (keys,)
        queries = cost.queries_work(cfg, device)
        return (queries,) if needed == ONLY_DQ else (keys, queries)

    def helpers_ms(self, cfg: Any, problem: Problem, device: DeviceSpec) -> float:
        sums_dq = cfg.dq == DqMode.ATOMICS and problem.gradients != NO_DQ
        return helpers_ms(problem, device, sums_dq)

    def dividing_tiles(self, cfg: FlashBackwardKernelConfig) -> dict[str, int]:
        return {"B_r": cfg.B_r, "B_c": cfg.B_c, "16 n_warps": cfg.dq_rows}

    def smem_map(self, cfg: FlashBackwardKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: FlashBackwardKernelConfig) -> Intensity:
        return describe.intensity(cfg)

    def conflict_kinds(self) -> Mapping[str, tuple[str, ...]]:
        return describe.CONFLICT_KINDS


MMA_SYNC_BACKWARD = register_family(MmaSyncBackwardFamily())
