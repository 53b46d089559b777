"""The families of the backward pass and of decode: names, rules, and what C++ says of the same
configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from cpp_side import check_assumptions, figures_in_cpp
from grids.backward_grid import covering_backward_cases

from flashsmith.families import (
    KNOWN_DEVICES,
    DqMode,
    DType,
    FlashBackwardKernelConfig,
    FlashDecodeKernelConfig,
    KernelConfig,
    MmaSyncMlaKernelConfig,
    WgmmaBackwardKernelConfig,
    WgmmaDqKernelConfig,
    WgmmaMlaKernelConfig,
    broken_rules,
    device_spec,
    family_named,
    get_kernel_configs,
    is_legal,
    parse_kernel_name_into_config,
)
from flashsmith.families.wgmma_backward.config import DqSums, StepOrder
from flashsmith.semantics.cache_format import CacheFormat

H200 = device_spec("H200")
MANY = 4000
BACKWARD, HOPPER = family_named("mma_sync_backward"), family_named("wgmma_backward")
Change = Mapping[str, Any]
SPLIT: Change = {"d_head": 256, "B_c": 64, "split_roles": True}
NO_SUMS: Change = {"order": StepOrder.SCORES_TOGETHER, "ds_stages": 1}
SHARED: Change = {**SPLIT, "d_head": 192, "shared_dq": True}
PAIR: Change = {**SPLIT, "d_head": 512, "do_stages": 1, "cta_pair": True}
WIDE: Change = {"d_head": 256, "B_r": 128, "n_warps": 8, "column_warps": 2, "stages": 2}
MANY_WARPS: Change = {"n_warps": 8, "d_head": 96, "B_r": 32, "B_c": 128, "dq": DqMode.ATOMICS}


@dataclass(frozen=True)
class Sample:
    """A legal config of a family, and what breaks when it changes."""

    legal: KernelConfig
    name: str
    #: A change that breaks it, for every rule.
    illegal: Mapping[str, Change]
    #: What the kernels take for granted, as its assertion begins, and a change that breaks it.
    assumptions: Mapping[str, Change]
    #: Figures of a config that C++ has too.
    figures: Sequence[str]

    def configs(self) -> list[KernelConfig]:
        """All, or where they are too many those around the search space; legal or not."""
        family = self.legal.family
        values = family.knob_values
        if prod(map(len, values.values())) < MANY:
            return [type(self.legal)(*each) for each in product(*values.values())]
        spaces = (family.search_space(DType.BF16, d, False) for d in values["d_head"])
        found = {self.legal, *(cfg for space in spaces for cfg in space)}
        changes = [{knob: value} for knob in values for value in values[knob]]
        found = {replace(cfg, **change) for cfg in found for change in changes}
        while len(found) <= MANY / 4:  # of a family with a small space
            found |= {replace(cfg, **change) for cfg in found for change in changes}
        return sorted(found)


# Of a config of 64 elements a row: what makes it keep the canonical order on sm_90.
CANONICAL = {"canonical": 1, "B_c": 128, "min_keys": 128, "parts_per_sm": 1}

SAMPLES = {
    "mma_sync_backward": Sample(
        FlashBackwardKernelConfig(DType.FP16, 64, 64, 64, 4),
        "(FP16, 64, 64, 64, 4): backward",
        {
            "warp_keys_in_mma_steps": {"B_c": 32},
            "warp_queries_in_mma_steps": {"column_warps": 4, "B_r": 32},
            "column_warps_fill_panels": {"column_warps": 4, "d_head": 96},
            "keys_fit_registers": {"d_head": 256},
            "queries_fit_registers": {"d_head": 192, "B_r": 128},
            "warps_share_dq": MANY_WARPS,
            "smem_within_limit": WIDE,
            "d_head_supported": {"d_head": 88},
            "B_r_supported": {"B_r": 48},
            "B_c_supported": {"B_c": 96},
            "n_warps_supported": {"n_warps": 12},
            "column_warps_supported": {"column_warps": 3},
            "stages_supported": {"stages": 3},
            "d_v_supported": {"d_v": 96},
        },
        {
            "d_head": {"d_head": 84},
            "d_v": {"d_v": 96},
            "B_r: 32": {"B_r": 48},
            "B_c": {"B_c": 32},
            "column_warps: 4": {"column_warps": 4, "d_head": 96},
            "B_r: a warp": {"column_warps": 4, "B_r": 32},
            "dq: its tile": MANY_WARPS,
            "stages": {"stages": 3},
            "the tiles need more shared memory": WIDE,
        },
        ("keys_smem_bytes", "queries_smem_bytes", "smem_bytes", "dq_rows"),
    ),
    "wgmma_backward": Sample(
        WgmmaBackwardKernelConfig(DType.FP16, 64, 64, 128, 2),
        "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240",
        {
            "d_head_supported": {"d_head": 88},
            "B_r_supported": {"B_r": 32},
            "n_warpgroups_supported": {"n_warpgroups": 4, "B_c": 256},
            "q_stages_supported": {"q_stages": 5},
            "do_stages_supported": {"do_stages": 5},
            "ds_stages_supported": {"ds_stages": 4},
            "B_c_is_warpgroups": {"B_c": 64},
            "roles_are_two": {**SPLIT, "order": StepOrder.LATE_DQ},
            "dq_has_64_rows": {"B_r": 128, "n_warpgroups": 3, "B_c": 192},
            "turns_need_scores_together": {"n_warpgroups": 3, "B_c": 192},
            "early_exp_needs_a_product": {"early_exp": True},
            "scores_early_need_two_Q": {"order": StepOrder.LATE_DQ, "q_stages": 1},
            "lagged_dq_needs_two_dS": {"lagged_dq": True, "ds_stages": 1},
            "pingpong_needs_two_warpgroups": {"pingpong": True, "n_warpgroups": 1, "B_c": 64},
            "split_roles_have_their_own_step": {**SPLIT, "lagged_dq": True},
            "sums_wait_for_scores": {**SPLIT, "dq_sums": DqSums.SUMS_AT_ONCE},
            "pairs_are_for_the_widest": {**SPLIT, "cta_pair": True},
            "pairs_split_roles": {**PAIR, "ordered_dq": True},
            "bulk_sums_are_whole": {**SPLIT, "bulk_sums": True},
            "shared_dq_is_split": {"shared_dq": True},
            "multicast_has_two_readers": {"multicast": True},
            "early_rows_before_scores": {"early_rows": True},
            "dq_before_dk_is_lagged": {"dq_sums": DqSums.SUMS_UNDER_DK},
            "without_dq_nothing_is_dqs": {"without_dq": True},
            "separate_dq_has_a_kernel": {**NO_SUMS, "without_dq": True, "separate_dq": True},
            "producer_registers_supported": {"producer_registers": 20},
            "consumer_registers_supported": {"consumer_registers": 236},
            "registers_within_file": {"producer_registers": 40},
            "tiles_fit_registers": {"d_head": 128, "B_r": 128},
            "smem_within_limit": {"d_head": 128, "q_stages": 4, "do_stages": 4, "ds_stages": 3},
            "d_v_supported": {"d_v": 96},
        },
        {
            "d_head: a wgmma": {"d_head": 84},
            "d_v": {"d_v": 96},
            "B_c": {"B_c": 64},
            "split_roles: for wide": {**SPLIT, "order": StepOrder.LATE_DQ},
            "B_r: a part": {"B_r": 128, "n_warpgroups": 3, "B_c": 192},
            "order": {"n_warpgroups": 3, "B_c": 192},
            "the tiles need more": {
                "d_head": 128, "q_stages": 4, "do_stages": 4, "ds_stages": 3
            },
            "registers: setmaxnreg takes": {"producer_registers": 20},
            "registers: setmaxnreg deadlocks": {"producer_registers": 40},
            "early_exp": {"early_exp": True},
            "lagged_dq": {"lagged_dq": True, "ds_stages": 1},
            "split_roles: excludes": {**SPLIT, "lagged_dq": True},
            "cta_pair": {**PAIR, "ordered_dq": True},
            "shared_dq": {**SHARED, "ds_stages": 1, "without_dq": True},
            "multicast": {"multicast": True},
            "pingpong": {"pingpong": True, "n_warpgroups": 1, "B_c": 64},
            "bulk_sums": {**SPLIT, "bulk_sums": True},
            "early_rows": {"early_rows": True},
            "dq_sums: split": {**SPLIT, "dq_sums": DqSums.SUMS_AT_ONCE},
            "dq_sums: without": {"dq_sums": DqSums.SUMS_UNDER_DK},
            "without_dq": {"without_dq": True},
            "separate_dq": {**NO_SUMS, "without_dq": True, "separate_dq": True},
            "q_stages": {"order": StepOrder.LATE_DQ, "q_stages": 1},
        },
        (
            *("smem_bytes", "n_threads", "n_ctas", "dq_columns", "shares_rows", "shares_columns"),
            *("key_groups", "dq_smem_bytes", "cluster_keys"),
        ),
    ),
    "wgmma_dq": Sample(
        WgmmaDqKernelConfig(DType.FP16, 64, 128, 128, 2),
        "(FP16, 64, 128, 128, 2): tma_dq+k_stages_2+v_stages_2+regs_24_240",
        {
            "d_head_supported": {"d_head": 88},
            "B_c_supported": {"B_c": 80},
            "n_warpgroups_supported": {"n_warpgroups": 4, "B_r": 256},
            "k_stages_supported": {"k_stages": 5},
            "v_stages_supported": {"v_stages": 5},
            "B_r_is_warpgroups": {"B_r": 64},
            "late_dq_needs_two_K": {"late_dq": True, "k_stages": 1},
            "pingpong_needs_two_warpgroups": {"pingpong": True, "n_warpgroups": 1, "B_r": 64},
            "producer_registers_supported": {"producer_registers": 20},
            "consumer_registers_supported": {"consumer_registers": 236},
            "registers_within_file": {"producer_registers": 40},
            "tiles_fit_registers": {"d_head": 128, "late_dq": True},
            "smem_within_limit": {"d_head": 128, "k_stages": 4},
            "d_v_supported": {"d_v": 96},
        },
        {
            "d_head: a wgmma": {"d_head": 84},
            "B_r": {"B_r": 64},
            "B_c": {"B_c": 72},
            "d_v": {"d_v": 96},
            "the tiles need more": {"d_head": 128, "k_stages": 4},
            "registers: setmaxnreg takes": {"producer_registers": 20},
            "registers: setmaxnreg deadlocks": {"producer_registers": 40},
            "late_dq": {"late_dq": True, "k_stages": 1},
            "pingpong": {"pingpong": True, "n_warpgroups": 1, "B_r": 64},
        },
        ("smem_bytes", "n_threads", "tile_bytes"),
    ),
    "wgmma_mla": Sample(
        WgmmaMlaKernelConfig(DType.FP16, 320, d_v=256),
        "(FP16, 320:256): latent+least_512+parts_16+regs_24_240",
        {
            "widths_supported": {"d_v": 512},
            "min_keys_supported": {"min_keys": 192},
            "most_parts_supported": {"most_parts": 3},
            "rescale_threshold_supported": {"rescale_threshold": 4},
            "run_keys_supported": {"run_keys": 1024},
            "panels_ahead_supported": {"panels_ahead": 2},
            "producer_registers_supported": {"producer_registers": 20},
            "consumer_registers_supported": {"consumer_registers": 236},
            "registers_within_file": {"producer_registers": 40},
            "tiles_fit_registers": {"consumer_registers": 128},
            "smem_within_limit": {"d_head": 640},
        },
        {
            "d_head: a row": {"d_head": 256},
            "d_v: a warpgroup": {"d_v": 192},
            "the tiles need more": {"d_head": 704},
            "registers: setmaxnreg takes": {"producer_registers": 20},
            "registers: setmaxnreg deadlocks": {"producer_registers": 40},
            "run_keys": {"run_keys": 256},
            "panels_ahead": {"panels_ahead": 5},
            "min_keys": {"min_keys": 64},
        },
        ("smem_bytes",),
    ),
    "mma_sync_mla": Sample(
        MmaSyncMlaKernelConfig(DType.FP16, 320, 32, d_v=256),
        "(FP16, 320:256, 32): latent_mma+stages_3+least_512+parts_16",
        {
            "widths_supported": {"d_v": 512},
            "B_c_supported": {"B_c": 96},
            "stages_supported": {"stages": 7},
            "min_keys_supported": {"min_keys": 192},
            "most_parts_supported": {"most_parts": 3},
            "smem_within_limit": {"d_head": 576, "d_v": 512, "B_c": 64, "stages": 4},
        },
        {
            "d_head, d_v: rows": {"d_head": 256},
            "B_c: a warp": {"B_c": 48},
            "stages: a block": {"stages": 1},
            "the blocks need more": {"d_head": 704, "stages": 6},
            "min_keys": {"min_keys": 16},
        },
        ("smem_bytes",),
    ),
    "mma_sync_decode": Sample(
        FlashDecodeKernelConfig(DType.FP16, 64, 16, 64, 4),
        "(FP16, 64, 16, 64, 4): decode+stages_3+least_128+parts_2",
        {
            "chunk_warpgroups_supported": {"chunk_warpgroups": 4},
            "chunk_warpgroups_fit_registers": {"chunk_warpgroups": 3, "d_head": 192},
            "chunk_warpgroups_without_cluster": {"chunk_warpgroups": 2, "chunk_cluster": 2},
            "d_head_supported": {"d_head": 80},
            "B_r_supported": {"B_r": 48},
            "B_c_supported": {"B_c": 48},
            "n_warps_supported": {"n_warps": 3},
            "stages_supported": {"stages": 7},
            "min_keys_supported": {"min_keys": 192},
            "parts_per_sm_supported": {"parts_per_sm": 5},
            "warp_keys_in_mma_steps": {"n_warps": 8},
            "rows_fit_registers": {"d_head": 256, "B_r": 32},
            "own_columns_of_four_warps": {"d_head": 512},
            "rounds_supported": {"rounds": 3},
            "cluster_supported": {"cluster": 4},
            "chunk_rows_supported": {"chunk_rows": 48},
            "chunk_keys_in_copies": {"d_head": 96, "B_c": 32, "n_warps": 2, "chunk_rows": 128},
            "chunk_rows_fit_registers": {"d_head": 256, "B_c": 64, "chunk_rows": 64},
            "own_rows_of_all_warps": {"own_rows": True},
            "own_rows_keep_queries": {"own_rows": True, "d_head": 192},
            "own_rows_without_exchange": {"own_rows": True, "full_tiles": True},
            "parts_of_whole_stages": {"B_c": 128, "min_keys": 64},
            "smem_within_limit": {"d_head": 256, "stages": 8},
            "canonical_supported": {"canonical": 2},
            "canonical_tile": CANONICAL | {"B_c": 64},
            "canonical_min_keys": CANONICAL | {"min_keys": 256},
            "canonical_parts_per_sm": CANONICAL | {"parts_per_sm": 2},
            "canonical_chunk_rows": CANONICAL | {"chunk_rows": 64},
            "canonical_n_warps": CANONICAL | {"n_warps": 8},
            "canonical_rounds": CANONICAL | {"rounds": 2},
            "canonical_cluster": CANONICAL | {"cluster": 2},
            "canonical_full_tiles": CANONICAL | {"full_tiles": True},
            "canonical_own_rows": CANONICAL | {"own_rows": True},
            "chunk_cluster_supported": CANONICAL | {"chunk_cluster": 3},
            "chunk_cluster_is_canonical": {"chunk_cluster": 2},
            "chunk_cluster_columns": CANONICAL | {"chunk_cluster": 8},
            "keys_first_in_a_cluster": {"keys_first": True},
            "cache_of_mma_sync": {"cache": CacheFormat.E4M3, "chunk_warpgroups": 2},
            "sums_fit_in_a_stage": {"cache": CacheFormat.E4M3, "d_v": 128, "B_c": 64},
            "d_v_supported": {"d_v": 96},
            "d_v_without_cluster": {"d_v": 128, "chunk_cluster": 2},
        },
        {
            "d_head": {"d_head": 80},
            "B_r": {"B_r": 48},
            "B_c: a power": {"B_c": 48, "n_warps": 3},
            "B_c: 16 or 32": {"n_warps": 8},
            "d_head: four warps": {"d_head": 512},
            "stages": {"stages": 1},
            "a thread has too many": {"d_head": 256, "B_r": 32},
            "own_rows": {"own_rows": True},
            "min_keys": {"B_c": 128, "min_keys": 64},
            "the tiles need more": {"d_head": 256, "stages": 8},
            "cache": {"cache": CacheFormat.SCALED, "chunk_warpgroups": 2},
            "d_v": {"d_v": 96},
        },
        (
            *("smem_bytes", "chunk_smem_bytes", "n_threads", "keys_per_warp", "keeps_queries"),
            *("most_ctas", "other_sums_bytes"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_short_forms_are_their_own(name: str) -> None:
    sample = SAMPLES[name]
    family, configs = sample.legal.family, sample.configs()
    assert len(configs) > MANY / 4
    for key in family.sets:
        configs += get_kernel_configs(key)
    for cfg in configs[:: -(-len(configs) // MANY)]:
        assert cfg.family is family
        assert parse_kernel_name_into_config(str(cfg)) == cfg
    assert str(sample.legal) == sample.name


@pytest.mark.parametrize("name", SAMPLES)
def test_each_rule_is_broken_by_a_config_of_its_own(name: str) -> None:
    sample = SAMPLES[name]
    legal, family = sample.legal, family_named(name)
    assert not broken_rules(legal, H200)
    ampere = device_spec("A100")
    on_other_gpus = {rule.name for rule in broken_rules(legal, ampere)}
    assert on_other_gpus == ({"arch_is_hopper"} if legal.OLDEST_ARCH == 90 else set())
    if "chunk_cluster" in family.knob_values:
        hopper = replace(legal, **CANONICAL, chunk_cluster=2)
        for one in (hopper, replace(legal, chunk_warpgroups=2)):
            assert is_legal(one, H200)
            on_other_gpus |= {rule.name for rule in broken_rules(one, ampere)} - set(sample.illegal)
    assert set(sample.illegal) | on_other_gpus == {rule.name for rule in family.rules}
    for rule, change in sample.illegal.items():
        assert rule in {broken.name for broken in broken_rules(replace(legal, **change), H200)}


@pytest.mark.parametrize("name", SAMPLES)
def test_sets_are_legal_and_for_every_head_dimension(name: str) -> None:
    family = family_named(name)
    for key in family.sets:
        configs = get_kernel_configs(key)
        assert len(set(configs)) == len(configs)
        # The set 'backward' is for an A100, whose shared memory is too small for 512 columns.
        widths = set(family.knob_values["d_head"]) - ({512} if key == "backward" else set())
        widths -= {72, 80}  # they have a test of their own: test_vision_gradients.py
        assert {cfg.d_head for cfg in configs} == widths
        assert all(is_legal(cfg, H200) for cfg in configs)


@pytest.mark.parametrize("name", SAMPLES)
def test_both_sides_say_the_same_of_every_config(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    configs = sample.configs()

    def figure(cfg: KernelConfig, name: str) -> int:
        found = getattr(cfg, name)
        return int(found() if callable(found) else found)

    expected = [tuple(figure(cfg, name) for name in sample.figures) for cfg in configs]
    assert figures_in_cpp(tmp_path, sample.figures, configs) == expected


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLES)
def test_what_the_kernels_take_for_granted_is_asserted(name: str, tmp_path: Path) -> None:
    check_assumptions(tmp_path, SAMPLES[name].legal, SAMPLES[name].assumptions)


# --- candidates ----------------------------------------------------------------------------------


def test_every_head_dimension_has_both_ways_of_dq_on_every_gpu() -> None:
    for device, d in product(KNOWN_DEVICES, BACKWARD.knob_values["d_head"]):
        found = BACKWARD.candidates(DType.BF16, d, device, False)
        # One CTA takes nearly all of an H100's shared memory for 512 columns.
        wide = {DqMode.ATOMICS} if device.max_smem_per_block > 200_000 else set()
        assert {cfg.dq for cfg in found} == (set(DqMode) if d < 512 else wide), (device.name, d)
        assert all(is_legal(cfg, device) for cfg in found)
    assert min(device.max_smem_per_block for device in KNOWN_DEVICES) == 101_376


def test_only_dq_without_atomics_is_the_same_in_every_run() -> None:
    for mode in DqMode:
        cfg = replace(SAMPLES["mma_sync_backward"].legal, dq=mode)
        assert BACKWARD.is_deterministic(cfg) == (mode == DqMode.TWO_KERNELS)


def test_every_problem_of_the_grid_has_configs() -> None:
    covered = covering_backward_cases("mma_sync_backward")
    assert {case.d for case in covered} > {40, 160}
    for case in covered:
        assert case.config.d_head >= case.d
        assert not case.deterministic or case.config.dq == DqMode.TWO_KERNELS


def test_under_a_mask_other_kernels_are_preferred() -> None:
    for d in (64, 128):
        plain, masked = (HOPPER.candidates(DType.FP16, d, H200, m) for m in (False, True))
        assert plain[0] != masked[0]
        assert set(plain[:-1]) == set(masked[:-1])


def test_a_candidate_for_every_head_repeats_its_bits() -> None:
    for d in (64, 96, 128, 192, 256):
        for masked in (False, True):
            *free, last = HOPPER.candidates(DType.BF16, d, H200, masked)
            assert not any(HOPPER.is_deterministic(cfg) for cfg in free)
            assert HOPPER.is_deterministic(last)
