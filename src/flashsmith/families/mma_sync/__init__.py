"""The mma.sync family (sm_80 and later): forward attention with mma.sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families.block_lists import has_lists, list_templates
from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import ConfigSet, Family, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import PAIRS, HeadDims
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync import cost, describe, rules, search_space, sets
from flashsmith.families.mma_sync.config import FlashForwardKernelConfig
from flashsmith.families.order import Order
from flashsmith.families.pack_gqa import pack_variants
from flashsmith.families.split_keys import merge_ms, split_variants, with_merge, with_parts
from flashsmith.families.tile_work import TileWork
from flashsmith.operations.problem import Problem
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType


class MmaSyncFamily(Family):
    """Kernels whose warps multiply with mma.sync and copy their operands with cp.async."""

    config_class = FlashForwardKernelConfig
    title = "mma.sync"
    rules = rules.RULES
    choose_first = (
        "dtype", "d_head", "d_v", "canonical", "n_warps", "B_r", "min_ctas_per_sm",
        "ping_pong", "kv_stages", "B_c",
    )  # fmt: skip
    csrc = Path(__file__).parents[2] / "csrc" / "mma_sync"
    cpp = CppNames(
        config_header="mma_sync/flash_attention.cuh",
        kernel_header="mma_sync/forward_kernel.cuh",
        kernel="flash_forward_kernel",
        static_config="StaticForwardKernelConfig",
        function="forward_kernel_fn",
        plan_header="mma_sync/plan.h",
    )
    pairs = PAIRS
    space_key = "space"
    has_cost_model = True
    equal_steps = True
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "prog": ConfigSet(
            "the progression: seven steps, one optimisation each",
            sets.get_kernel_progression_configs,
        ),
        "prog-all": ConfigSet(
            "the progression at every block size and warp count",
            partial(sets.get_kernel_progression_configs, all_block_sizes=True),
        ),
        "tune": ConfigSet(
            "what a search for the fastest kernel tries", sets.get_autotuning_kernel_configs
        ),
        "space": ConfigSet(
            "what 'flashsmith tune' searches: wider than tune, for more head dimensions",
            search_space.get_search_space_configs,
        ),
        "cover": ConfigSet("every two knob values that can meet do meet", sets.get_cover_configs),
    }

    def kernel_templates(self, cfg: FlashForwardKernelConfig) -> Mapping[str, str]:
        return with_merge(super().kernel_templates(cfg), cfg.split_keys, "flash_merge_kernel")

    def program_templates(
        self, cfg: FlashForwardKernelConfig, semantics: Semantics
    ) -> Mapping[str, str]:
        return list_templates(semantics, "flash")

    def adapt_to_program(
        self, cfg: FlashForwardKernelConfig, semantics: Semantics
    ) -> FlashForwardKernelConfig:
        # A list is for one Q block of one head, so tiles must not split keys or pack several heads.
        return replace(cfg, split_keys=0, pack_gqa=False) if has_lists(semantics) else cfg

    def kernels_to_build(self) -> Sequence[FlashForwardKernelConfig]:
        return sets.get_autotuning_kernel_configs()

    def block_size_set(self) -> Sequence[FlashForwardKernelConfig]:
        return sets.get_autotuning_kernel_configs()

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[FlashForwardKernelConfig]:
        return sets.candidates(dtype, d_head, device)

    def search_space(
        self, dtype: DType, d_head: HeadDims, masked: bool
    ) -> Sequence[FlashForwardKernelConfig]:
        return search_space.get_search_space_configs((dtype,), (d_head,))

    def moves(self, cfg: FlashForwardKernelConfig) -> Iterable[FlashForwardKernelConfig]:
        return search_space.moves(cfg)

    def worth_searching(self, cfg: FlashForwardKernelConfig) -> bool:
        return search_space.worth_searching(cfg)

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        return sets.proof_configs(dtype, d)

    def compile_cost(self, cfg: FlashForwardKernelConfig) -> float:
        return cost.compile_cost(cfg)

    def tile_work(
        self,
        cfg: FlashForwardKernelConfig,
        device: DeviceSpec,
        registers: int | None,
        spill: int | None,
    ) -> TileWork:
        return with_parts(cost.tile_work(cfg, device, registers, spill), cfg, device)

    def helpers_ms(
        self, cfg: FlashForwardKernelConfig, problem: Problem, device: DeviceSpec
    ) -> float:
        return merge_ms(self.tile_work(cfg, device, None, None), cfg, problem, device)

    def canonical(self, cfg: FlashForwardKernelConfig, device: DeviceSpec) -> Any:
        return sets.canonical(cfg, device)

    def order(self, cfg: FlashForwardKernelConfig, arch: int) -> Order:
        return describe.order(cfg, arch)

    def adapt_to_heads(
        self, cfg: FlashForwardKernelConfig, problem: Problem
    ) -> FlashForwardKernelConfig:
        return replace(cfg, pack_gqa=False) if problem.heads_q == problem.heads_k else cfg

    def pack_variants(
        self, cfg: FlashForwardKernelConfig, problem: Problem, device: DeviceSpec
    ) -> Sequence[FlashForwardKernelConfig]:
        found = pack_variants(cfg, self.tile_work(cfg, device, None, None), problem, device)
        return [one for one in found if is_legal(one, device)]

    def splits_keys(self, cfg: FlashForwardKernelConfig) -> bool:
        return cfg.split_keys > 0

    def split_variants(
        self, cfg: FlashForwardKernelConfig, problem: Problem, device: DeviceSpec
    ) -> Sequence[FlashForwardKernelConfig]:
        found = split_variants(cfg, self.tile_work(cfg, device, None, None), problem, device)
        return [one for one in found if is_legal(one, device)]

    def dividing_tiles(self, cfg: FlashForwardKernelConfig) -> dict[str, int]:
        return {"B_r": cfg.B_r, "B_c": cfg.B_c}

    def smem_map(self, cfg: FlashForwardKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: FlashForwardKernelConfig) -> Intensity:
        return describe.intensity(cfg)

    def conflict_kinds(self) -> Mapping[str, tuple[str, ...]]:
        return describe.CONFLICT_KINDS

    def multiplies_with(self, cfg: FlashForwardKernelConfig) -> tuple[str, ...]:
        fed = "mma_shared_32_rows" if cfg.rows_per_warp >= 32 else "mma_shared_16_rows"
        return ("mma_registers", fed)

    def loop_tiles(self, cfg: FlashForwardKernelConfig) -> tuple[int, int]:
        return cfg.B_r, cfg.B_c


MMA_SYNC = register_family(MmaSyncFamily())
