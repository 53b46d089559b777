"""The mma_sync_decode family (sm_80 and later): attention over a KV cache with mma.sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families.cpp import CppNames
from flashsmith.families.device import DeviceSpec, device_spec
from flashsmith.families.family import ConfigSet, Family, Intensity, SmemRegion, register_family
from flashsmith.families.head_dims import PAIRS, HeadDims, HeadPair
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync_decode import cost, describe, rules, search_space, sets
from flashsmith.families.mma_sync_decode.config import FlashDecodeKernelConfig
from flashsmith.families.order import Order
from flashsmith.families.tile_work import CallWork
from flashsmith.families.warpgroups import HOPPER_ARCH
from flashsmith.operations.problem import Problem
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType


class MmaSyncDecodeFamily(Family):
    """Kernels in which each CTA reads a part of the keys of a sequence, and a kernel that merges
    the results of the parts."""

    config_class = FlashDecodeKernelConfig
    title = "mma.sync decode"
    operation = "decode"
    rules = rules.RULES
    choose_first = (
        "dtype", "d_head", "d_v", "canonical", "B_r", "n_warps", "B_c", "stages", "min_keys",
    )  # fmt: skip
    pairs = PAIRS
    csrc = Path(__file__).parents[2] / "csrc" / "mma_sync_decode"
    cpp = CppNames(
        config_header="mma_sync_decode/config.cuh",
        kernel_header="mma_sync_decode/decode_kernels.cuh",
        kernel="decode_kernel",
        static_config="StaticDecodeKernelConfig",
        function="decode_kernel_fn",
        plan_header="mma_sync_decode/plan.h",
        plan_function="plan_decode",
    )
    must_not_spill = True
    space_key = "decode"
    translation_seconds = 0.5
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "decode": ConfigSet("kernels of attention over a cache", sets.get_decode_configs),
    }

    def target_suffix_for(self, arch: int) -> str:
        # chunk_warpgroups uses wgmma.
        return "a" if arch == HOPPER_ARCH else ""

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        chunks = {"chunk": "decode_chunk_kernel", "paged_chunk": "decode_paged_chunk_kernel"}
        return {
            "main": self.cpp.kernel,
            "paged": "decode_paged_kernel",
            "merge": "decode_merge_kernel",
            "append": "decode_append_kernel",
            "merge_rows": "decode_merge_rows_kernel",
            **(chunks if cfg.chunk_rows else {}),
            **({"merge_arriving": "decode_merge_arriving_kernel"} if cfg.has_arrivals else {}),
            **({"warpgroups": "decode_warpgroup_kernel"} if cfg.chunk_warpgroups else {}),
        }

    def candidates(
        self, dtype: DType, d_head: HeadDims, device: DeviceSpec, masked: bool
    ) -> Sequence[FlashDecodeKernelConfig]:
        return sets.candidates(dtype, d_head, device)

    def search_space(
        self, dtype: DType, d_head: HeadDims, masked: bool
    ) -> Sequence[FlashDecodeKernelConfig]:
        return search_space.search_space(dtype, d_head)

    def moves(self, cfg: FlashDecodeKernelConfig) -> Iterable[FlashDecodeKernelConfig]:
        return search_space.moves(cfg)

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        d_head = d
        if not isinstance(d, HeadPair):
            d_head = min(d_head for d_head in self.knob_values["d_head"] if d <= d_head)
        device = device_spec(self.oldest_arch)
        found = sets.candidates(dtype, d_head, device)  # there is only one candidate for d 512
        first, others, last = found[0], found[1:-1], found[-1]
        last = replace(last, chunk_rows=64, cluster=8, full_tiles=True)
        chunks = (replace(first, chunk_rows=128), *others, last)
        # These configs resemble ones in the shipped tables of winners.
        entry = replace(first, parts_per_sm=2, early=True, cluster=8)
        own_rows = replace(entry, B_r=32, B_c=64, n_warps=2, own_rows=True)
        return [first, *(cfg for cfg in (*chunks, entry, own_rows) if is_legal(cfg, device))]

    def canonical(self, cfg: FlashDecodeKernelConfig, device: DeviceSpec) -> Any:
        return sets.canonical(cfg, device)

    def order(self, cfg: FlashDecodeKernelConfig, arch: int) -> Order:
        return describe.order(cfg, arch)

    def cache_of(self, cfg: FlashDecodeKernelConfig) -> str:
        return cfg.cache.label

    def has_more_arguments(self, cfg: FlashDecodeKernelConfig) -> bool:
        return bool(cfg.cache)

    def adapt_to_program(
        self, cfg: FlashDecodeKernelConfig, semantics: Semantics
    ) -> FlashDecodeKernelConfig:
        # Kernels in which a cluster or warpgroups compute a chunk compute scores by code of their
        # own, which does not support programs.
        plain = replace(cfg, chunk_cluster=0, chunk_warpgroups=0, keys_first=False)
        if not cfg.canonical:
            return plain
        return replace(plain, n_warps=min(cfg.n_warps, rules.MOST_CANONICAL_WARPS))

    def adapt_to_queries(
        self, cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec
    ) -> FlashDecodeKernelConfig:
        return sets.adapt_to_queries(cfg, problem, device)

    has_cost_model = True

    def compile_cost(self, cfg: FlashDecodeKernelConfig) -> float:
        return cost.compile_cost(cfg)

    def call_work(self, cfg: Any, problem: Problem, device: DeviceSpec) -> CallWork:
        return cost.call_work(cfg, problem, device)

    def plan_costs(self, gpu: str) -> Sequence[float]:
        return cost.plan_costs(gpu)

    def smem_map(self, cfg: FlashDecodeKernelConfig) -> Sequence[SmemRegion]:
        return describe.smem_map(cfg)

    def intensity(self, cfg: FlashDecodeKernelConfig) -> Intensity:
        return describe.intensity(cfg)

    def most_rows(self, cfg: FlashDecodeKernelConfig) -> int | None:
        return sets.CLUSTER_ROWS if cfg.chunk_cluster else None

    def conflict_kinds(self) -> Mapping[str, tuple[str, ...]]:
        return describe.CONFLICT_KINDS


MMA_SYNC_DECODE = register_family(MmaSyncDecodeFamily())
