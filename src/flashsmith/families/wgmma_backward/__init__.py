"""The wgmma_backward family (sm_90a): gradients of attention with wgmma, to which TMA copies the
operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families.backward_work import HELPER_TEMPLATES, helpers_ms
from flashsmith.families.block_lists import query_list_templates
from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import PAIRS, HeadDims
from flashsmith.families.tile_work import TileWork
from flashsmith.families.warpgroups import WARPGROUP_ROWS, WarpgroupBackwardFamily
from flashsmith.families.wgmma_backward import cost, describe, rules, search_space, sets
from flashsmith.families.wgmma_backward.config import D_HEADS, WgmmaBackwardKernelConfig
from flashsmith.operations.problem import Problem
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.sizes import NO_DQ


class WgmmaBackwardFamily(WarpgroupBackwardFamily):
    """Kernels in which each consumer warpgroup has 64 keys, or two of them share 64 keys, while
    another warpgroup copies queries by TMA."""

    config_class = WgmmaBackwardKernelConfig
    title = "wgmma backward"
    d_heads = D_HEADS
    pairs = PAIRS
    rules = rules.RULES
    choose_first = (
        "dtype", "d_head", "cta_pair", "shared_dq", "split_roles", "n_warpgroups", "B_r", "B_c",
        "q_stages", "do_stages", "ds_stages", "order", "consumer_registers", "producer_registers",
    )  # fmt: skip
    csrc = Path(__file__).parents[2] / "csrc" / "wgmma_backward"
    cpp = CppNames(
        config_header="wgmma_backward/config.cuh",
        kernel_header="wgmma_backward/backward_kernel.cuh",
        kernel="hopper_backward_kernel",
        static_config="StaticHopperBackwardKernelConfig",
        function="hopper_backward_kernel_fn",
        plan_header="wgmma_backward/plan.h",
        plan_function="plan_backward",
    )
    space_key = "hopper-backward"
    translation_seconds = 0.5
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "hopper-backward": ConfigSet(
            "the wgmma kernels of the backward pass, for sm_90", sets.get_hopper_backward_configs
        ),
    }

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        of_dq = {}
        if cfg.separate_dq:
            of_dq = {"dq": "hopper_dq_kernel"}
        elif cfg.sums_dq:
            of_dq = {"finish": "hopper_backward_finish_kernel"}
        return {"main": self.cpp.kernel, **of_dq, **HELPER_TEMPLATES}

    def program_templates(self, cfg: Any, semantics: Semantics) -> Mapping[str, str]:
        lists = query_list_templates(semantics)
        if lists and cfg.ordered_dq:
            return {**lists, "rank_blocks": "hopper_backward_rank_blocks_kernel"}
        return lists

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[WgmmaBackwardKernelConfig]:
        return sets.candidates(dtype, d_head, device, masked)

    def proven_configs(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec
    ) -> Sequence[WgmmaBackwardKernelConfig]:
        return sets.proof_configs(dtype, d_head, device)

    def search_space(
        self, dtype: DType, d_head: HeadDims, masked: bool
    ) -> Sequence[WgmmaBackwardKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def moves(self, cfg: WgmmaBackwardKernelConfig) -> Iterable[WgmmaBackwardKernelConfig]:
        return search_space.moves(cfg)

    def gradients_of(self, cfg: WgmmaBackwardKernelConfig) -> str:
        return NO_DQ if cfg.without_dq else ""

    def for_gradients(
        self, cfg: WgmmaBackwardKernelConfig, gradients: str
    ) -> WgmmaBackwardKernelConfig:
        return sets.without_dq(cfg) if gradients == NO_DQ else cfg

    def is_deterministic(self, cfg: WgmmaBackwardKernelConfig) -> bool:
        return cfg.ordered_dq or not cfg.sums_dq

    def adapt_to_registers(
        self, cfg: WgmmaBackwardKernelConfig, semantics: Semantics
    ) -> WgmmaBackwardKernelConfig:
        if semantics.score.is_plain:
            return cfg
        # shared_dq was not measured with a softcap.
        return self._with_p_beside_s(sets.without_shared_dq(cfg) if cfg.shared_dq else cfg)

    @staticmethod
    def _with_p_beside_s(cfg: WgmmaBackwardKernelConfig) -> WgmmaBackwardKernelConfig:
        """Returns `cfg`, or a similar config whose consumers have registers for P in addition to
        S."""
        # Kernels with 128 queries per step spill 900 to 1,300 bytes per thread with a softcap.
        if rules.holds_p_beside_s(cfg):
            return cfg
        producer, consumer = sets.registers(2, cfg.persistent, cfg.ordered_dq)
        return replace(
            cfg,
            B_r=WARPGROUP_ROWS,
            B_c=2 * WARPGROUP_ROWS,
            n_warpgroups=2,
            producer_registers=producer,
            consumer_registers=consumer,
            pingpong=True,
        )

    def adapt_to_program(
        self, cfg: WgmmaBackwardKernelConfig, semantics: Semantics
    ) -> WgmmaBackwardKernelConfig:
        # With 128 queries per step, kernels of score functions spill 880 to 1,160 bytes per thread.
        program = semantics.caller_program
        if program is None:
            return cfg
        if cfg.separate_dq:
            # The separate kernel for dq would need lists of its own.
            cfg = sets.ordered_like(cfg)
        if cfg.shared_dq:
            # With a mask function, the CTAs of a cluster would have different lists of blocks. With
            # a score function, shared_dq was not measured.
            cfg = sets.without_shared_dq(cfg)
        if cfg.cta_pair and program.mask is not None:
            # With lists of blocks, a kernel with early_rows would spill 20 bytes per thread.
            cfg = replace(cfg, early_rows=False)
        if program.score is None:
            return cfg
        return self._with_p_beside_s(cfg)

    def compile_cost(self, cfg: WgmmaBackwardKernelConfig) -> float:
        return cost.COMPILE_COST

    def tile_work(
        self, cfg: Any, device: DeviceSpec, registers: int | None, spill: int | None
    ) -> TileWork:
        return cost.tile_work(cfg, device)

    def helpers_ms(self, cfg: Any, problem: Problem, device: DeviceSpec) -> float:
        return helpers_ms(problem, device, sums_dq=cfg.sums_dq)

    def loops(
        self,
        cfg: Any,
        problem: Problem,
        device: DeviceSpec,
        registers: int | None = None,
        spill: int | None = None,
    ) -> Sequence[TileWork]:
        of_keys = cost.tile_work(cfg, device)
        if not cfg.separate_dq:
            return (of_keys,)
        of_queries = cfg.dq_kernel.family.tile_work(cfg.dq_kernel, device, registers, spill)
        return (of_keys, of_queries)

    def dividing_tiles(self, cfg: WgmmaBackwardKernelConfig) -> dict[str, int]:
        tiles = super().dividing_tiles(cfg)
        if not cfg.separate_dq:
            return tiles
        return tiles | {"the rows of dq's kernel": cfg.dq_kernel.B_r, "its keys": cfg.dq_kernel.B_c}

    def smem_map(self, cfg: WgmmaBackwardKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: WgmmaBackwardKernelConfig) -> Intensity:
        return describe.intensity(cfg)


WGMMA_BACKWARD = register_family(WgmmaBackwardFamily())
