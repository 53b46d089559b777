"""The wgmma family: warp-specialised kernels for Hopper GPUs, to which TMA copies the operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families.block_lists import has_lists, list_templates
from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import PAIRS, HeadDims
from flashsmith.families.legality import is_legal
from flashsmith.families.order import Order
from flashsmith.families.pack_gqa import pack_variants
from flashsmith.families.split_keys import merge_ms, split_variants, with_merge, with_parts
from flashsmith.families.tile_work import TileWork
from flashsmith.families.warpgroups import WARPGROUP_ROWS, WarpgroupFamily
from flashsmith.families.wgmma import cost, describe, rules, search_space, sets
from flashsmith.families.wgmma.config import DEFAULT_SECTION_MIB, WgmmaForwardKernelConfig
from flashsmith.operations.problem import Problem
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType


class WgmmaFamily(WarpgroupFamily):
    """Kernels whose consumer warpgroups multiply with wgmma, while another warpgroup copies by
    TMA."""

    config_class = WgmmaForwardKernelConfig
    title = "wgmma"
    rules = rules.HOPPER_RULES
    # Knobs that determine shared memory are settled before knobs that determine registers, so that
    # the search ends soon on a device that has too little shared memory for all tiles.
    choose_first = (
        "dtype", "d_head", "d_v", "canonical", "n_warpgroups", "B_r", "B_c", "kv_stages",
        "q_buffers", "separate_O",
        "ctas_per_sm", "overlap", "consumer_registers", "producer_registers",
    )  # fmt: skip
    repairs: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # Only fewer registers can make a config legal, and the producer needs at least 24.
        "producer_registers": (24, 32, 40),
        # Trying only this value is enough to find a legal config; more values would only lengthen
        # the search.
        "section_mib": (DEFAULT_SECTION_MIB,),
        "ctas_per_sm": (1,),
    }
    csrc = Path(__file__).parents[2] / "csrc" / "wgmma"
    cpp = CppNames(
        config_header="sm90_forward/config.cuh",
        kernel_header="wgmma/forward_kernel.cuh",
        kernel="hopper_forward_kernel",
        static_config="StaticHopperKernelConfig",
        function="hopper_forward_kernel_fn",
        plan_header="wgmma/plan.h",
    )
    persistent = True
    pairs = PAIRS
    space_key = "hopper"
    has_cost_model = True
    translation_seconds = 0.3
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "hopper": ConfigSet(
            "the wgmma kernels that the package ships, for sm_90", sets.get_hopper_configs
        )
    }

    def kernel_templates(self, cfg: WgmmaForwardKernelConfig) -> Mapping[str, str]:
        return with_merge(super().kernel_templates(cfg), cfg.split_keys, "hopper_merge_kernel")

    def program_templates(
        self, cfg: WgmmaForwardKernelConfig, semantics: Semantics
    ) -> Mapping[str, str]:
        return list_templates(semantics, "hopper")

    def shipped(self) -> Sequence[tuple[WgmmaForwardKernelConfig, Semantics]]:
        # The semantics are plain and causal attention on whole tiles, for which the configs were
        # chosen.
        return [
            (cfg, semantics)
            for cfg in sets.get_hopper_configs()
            for semantics in (Semantics(), Semantics("causal"))
        ]

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[WgmmaForwardKernelConfig]:
        return sets.candidates(dtype, d_head, device, masked)

    def search_space(
        self, dtype: DType, d_head: HeadDims, masked: bool
    ) -> Sequence[WgmmaForwardKernelConfig]:
        return search_space.get_hopper_space_configs((dtype,), (d_head,), masked)

    def moves(self, cfg: WgmmaForwardKernelConfig) -> Iterable[WgmmaForwardKernelConfig]:
        return search_space.moves(cfg)

    def worth_searching(self, cfg: WgmmaForwardKernelConfig) -> bool:
        return search_space.worth_searching(cfg)

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        return sets.proof_configs(dtype, d)

    def compile_cost(self, cfg: WgmmaForwardKernelConfig) -> float:
        return cost.COMPILE_COST

    def tile_work(
        self,
        cfg: WgmmaForwardKernelConfig,
        device: DeviceSpec,
        registers: int | None,
        spill: int | None,
    ) -> TileWork:
        return with_parts(cost.tile_work(cfg, device, registers, spill), cfg, device)

    def helpers_ms(
        self, cfg: WgmmaForwardKernelConfig, problem: Problem, device: DeviceSpec
    ) -> float:
        return merge_ms(self.tile_work(cfg, device, None, None), cfg, problem, device)

    def adapt_to_heads(
        self, cfg: WgmmaForwardKernelConfig, problem: Problem
    ) -> WgmmaForwardKernelConfig:
        group = problem.heads_q // max(1, problem.heads_k)
        return cfg if group > 1 and WARPGROUP_ROWS % group == 0 else replace(cfg, pack_gqa=False)

    def adapt_to_registers(
        self, cfg: WgmmaForwardKernelConfig, semantics: Semantics
    ) -> WgmmaForwardKernelConfig:
        # At d 256, kernels of these semantics spill even if Q is not in registers.
        spills = semantics.packed or (
            semantics.key_mask.takes_limits and not semantics.score.is_plain
        )
        return replace(cfg, register_Q=0) if spills and cfg.d_head > 128 else cfg

    def adapt_to_program(
        self, cfg: WgmmaForwardKernelConfig, semantics: Semantics
    ) -> WgmmaForwardKernelConfig:
        # Kernels with a stale maximum compute scores a second time, so they would contain the code
        # of a score function twice. With three warpgroups, kernels with functions have no registers
        # for longer tiles or for the code of short blocks.
        program = semantics.caller_program
        stale_max = cfg.stale_max and program is not None and program.score is None
        adapted = replace(cfg, stale_max=stale_max, short_block=0)
        if cfg.n_warpgroups > 2 and cfg.B_c > 128:
            adapted = replace(adapted, B_c=128)
        # A list of blocks is for the rows of one CTA in one head.
        if has_lists(semantics):
            adapted = replace(adapted, cluster_size=1, split_keys=0, pack_gqa=False)
        return adapted

    def canonical(self, cfg: WgmmaForwardKernelConfig, device: DeviceSpec) -> Any:
        return sets.canonical(cfg, device)

    def order(self, cfg: WgmmaForwardKernelConfig, arch: int) -> Order:
        return describe.order(cfg, arch)

    def pack_variants(
        self, cfg: WgmmaForwardKernelConfig, problem: Problem, device: DeviceSpec
    ) -> Sequence[WgmmaForwardKernelConfig]:
        found = pack_variants(cfg, self.tile_work(cfg, device, None, None), problem, device)
        fitting = (one for one in found if one == self.adapt_to_heads(one, problem))
        return [one for one in fitting if is_legal(one, device)]

    def splits_keys(self, cfg: WgmmaForwardKernelConfig) -> bool:
        return cfg.split_keys > 0

    def split_variants(
        self, cfg: WgmmaForwardKernelConfig, problem: Problem, device: DeviceSpec
    ) -> Sequence[WgmmaForwardKernelConfig]:
        found = split_variants(cfg, self.tile_work(cfg, device, None, None), problem, device)
        return [one for one in found if is_legal(one, device)]

    def dividing_tiles(self, cfg: WgmmaForwardKernelConfig) -> dict[str, int]:
        # TMA skips rows of Q and O beyond the tensor, so only the number of keys must be a multiple
        # of the tile.
        return {"B_c": cfg.B_c}

    def loop_tiles(self, cfg: WgmmaForwardKernelConfig) -> tuple[int, int]:
        return cfg.B_r, cfg.B_c

    def smem_map(self, cfg: WgmmaForwardKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: WgmmaForwardKernelConfig) -> Intensity:
        return describe.intensity(cfg)

    def multiplies_with(self, cfg: WgmmaForwardKernelConfig) -> tuple[str, ...]:
        return ("wgmma_n128", "wgmma_n256")


WGMMA = register_family(WgmmaFamily())
