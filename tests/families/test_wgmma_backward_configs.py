"""The wgmma_backward family: names, rules, and what C++ says of the same configs."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flashsmith.builder.sources import package_sources
from flashsmith.families import (
    DType,
    HopperBackwardKernelConfig,
    broken_rules,
    device_spec,
    family_named,
    get_kernel_configs,
    parse_kernel_name_into_config,
)
from flashsmith.families.wgmma_backward.config import DqSums, StepOrder

FAMILY = family_named("wgmma_backward")
H200 = device_spec("H200")
KNOBS = [declared.name for declared in fields(HopperBackwardKernelConfig)]
PLAIN = HopperBackwardKernelConfig(DType.FP16, 64, 64, 128, 2)
MORE = [
    cfg
    for d in FAMILY.knob_values["d_head"]
    for cfg in FAMILY.search_space(DType.BF16, d, False)
    if isinstance(cfg, HopperBackwardKernelConfig)
]


def test_short_forms_are_their_own() -> None:
    assert len(MORE) > 100
    for cfg in [PLAIN, *get_kernel_configs("hopper-backward"), *MORE]:
        assert parse_kernel_name_into_config(str(cfg)) == cfg


def test_under_a_mask_other_kernels_are_preferred() -> None:
    for d in (64, 128):
        plain, masked = (FAMILY.candidates(DType.FP16, d, H200, m) for m in (False, True))
        assert plain[0] != masked[0]
        assert set(plain) == set(masked)


def test_a_candidate_for_every_head_up_to_192_repeats_its_bits() -> None:
    for d in (64, 96, 128, 192, 256):
        for masked in (False, True):
            *free, last = FAMILY.candidates(DType.BF16, d, H200, masked)
            assert not any(FAMILY.is_deterministic(cfg) for cfg in free)
            assert FAMILY.is_deterministic(last) == (d <= 192)


SPLIT: dict[str, Any] = {"d_head": 256, "B_c": 64, "split_roles": True}
ILLEGAL: dict[str, dict[str, Any]] = {
    "d_head_supported": {"d_head": 80},
    "B_r_supported": {"B_r": 32},
    "n_warpgroups_supported": {"n_warpgroups": 4, "B_c": 256},
    "q_stages_supported": {"q_stages": 5},
    "do_stages_supported": {"do_stages": 5},
    "ds_stages_supported": {"ds_stages": 4},
    "B_c_is_warpgroups": {"B_c": 64},
    "roles_are_two": SPLIT | {"order": StepOrder.LATE_DQ},
    "dq_has_64_rows": {"B_r": 128, "n_warpgroups": 3, "B_c": 192},
    "turns_need_scores_together": {"n_warpgroups": 3, "B_c": 192},
    "early_exp_needs_a_product": {"early_exp": True},
    "scores_early_need_two_Q": {"order": StepOrder.LATE_DQ, "q_stages": 1},
    "lagged_dq_needs_two_dS": {"lagged_dq": True, "ds_stages": 1},
    "pingpong_needs_two_warpgroups": {"pingpong": True, "n_warpgroups": 1, "B_c": 64},
    "split_roles_have_their_own_step": SPLIT | {"lagged_dq": True},
    "sums_wait_for_scores": SPLIT | {"dq_sums": DqSums.SUMS_AT_ONCE},
    "bulk_sums_are_whole": SPLIT | {"bulk_sums": True},
    "dq_before_dk_is_lagged": {"dq_sums": DqSums.SUMS_UNDER_DK},
    "order_needs_registers": SPLIT | {"ordered_dq": True},
    "producer_registers_supported": {"producer_registers": 20},
    "consumer_registers_supported": {"consumer_registers": 236},
    "registers_within_file": {"producer_registers": 40},
    "tiles_fit_registers": {"d_head": 128, "B_r": 128},
    "smem_within_limit": {"d_head": 128, "q_stages": 4, "do_stages": 4, "ds_stages": 3},
}


def test_each_rule_is_broken_by_a_config_of_its_own() -> None:
    assert not broken_rules(PLAIN, H200)
    assert set(ILLEGAL) | {"arch_is_hopper"} == {rule.name for rule in FAMILY.rules}
    for name, change in ILLEGAL.items():
        assert name in {rule.name for rule in broken_rules(replace(PLAIN, **change), H200)}, name
    assert "arch_is_hopper" in {rule.name for rule in broken_rules(PLAIN, device_spec("A100"))}


# --- C++ -----------------------------------------------------------------------------------------

TABLE = """
#include "wgmma_backward/config.cuh"
using Config = flashsmith::HopperBackwardKernelConfig;
static Config config_from(const int* v) {{ return {{{members}}}; }}
constexpr bool has_all_fields(const Config& config) {{
    [[maybe_unused]] const auto& [{names}] = config;
    return true;
}}
static_assert(has_all_fields(Config{{}}));
extern "C" void tabulate(const int* configs, int count, int* out) {{
    for (int i = 0; i < count; ++i) {{
        const Config config = config_from(configs + i * {count});
        *out++ = static_cast<int>(config.smem_bytes());
        *out++ = config.n_threads();
        *out++ = config.dq_columns();
        *out++ = config.shares_rows();
        *out++ = config.shares_columns();
    }}
}}
"""


def test_both_sides_say_the_same_of_every_config(tmp_path: Path) -> None:
    """Designators must stand in the order of the members, and names for members be as many."""
    members = ", ".join(
        f".{name} = static_cast<decltype(Config::{name})>(v[{place}])"
        for place, name in enumerate(KNOBS)
    )
    names = ", ".join(f"m{place}" for place in range(len(KNOBS)))
    source, library = tmp_path / "table.cc", tmp_path / "table.so"
    source.write_text(TABLE.format(members=members, names=names, count=len(KNOBS)))
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    include = f"-I{package_sources()}"
    subprocess.run(["g++", *flags, include, str(source), "-o", str(library)], check=True)
    ints = [value for cfg in MORE for value in cfg.to_ints()]
    found = (ctypes.c_int * (5 * len(MORE)))()
    ctypes.CDLL(str(library)).tabulate((ctypes.c_int * len(ints))(*ints), len(MORE), found)
    expected = [
        int(value)
        for cfg in MORE
        for value in (
            cfg.smem_bytes(),
            cfg.n_threads,
            cfg.dq_columns,
            cfg.shares_rows,
            cfg.shares_columns,
        )
    ]
    assert list(found) == expected
