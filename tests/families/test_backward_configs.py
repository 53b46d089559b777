"""The mma_sync_backward family: names, rules, and what C++ says of the same configs."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest
from static_assertions import failed_assertions

from flashsmith.builder.sources import package_sources
from flashsmith.families import (
    KNOWN_DEVICES,
    DqMode,
    DType,
    FlashBackwardKernelConfig,
    broken_rules,
    device_spec,
    family_named,
    get_kernel_configs,
    is_legal,
    parse_kernel_name_into_config,
    rule_bitmask,
)
from flashsmith.verify.backward_grid import covering_backward_cases

FAMILY = family_named("mma_sync_backward")
H200 = device_spec("H200")
KNOBS = [declared.name for declared in fields(FlashBackwardKernelConfig)]
EVERY = [
    FlashBackwardKernelConfig(*values)
    for values in product(*(FAMILY.knob_values[name] for name in KNOBS))
]
SMALL = FlashBackwardKernelConfig(DType.FP16, 64, 64, 64, 4)


def test_short_forms_are_their_own() -> None:
    for cfg in EVERY:
        assert parse_kernel_name_into_config(str(cfg)) == cfg
    assert str(SMALL) == "(FP16, 64, 64, 64, 4): backward"
    forward = parse_kernel_name_into_config("(FP16, 64, 64, 64, 4): load_0_0_0_tiles")
    assert not isinstance(forward, FlashBackwardKernelConfig)


def test_every_head_dimension_has_both_ways_of_dq_on_every_gpu() -> None:
    for device, d in product(KNOWN_DEVICES, FAMILY.knob_values["d_head"]):
        found = FAMILY.candidates(DType.BF16, d, device, False)
        assert {cfg.dq for cfg in found} == set(DqMode), (device.name, d)
        assert all(is_legal(cfg, device) for cfg in found)
    assert min(device.max_smem_per_block for device in KNOWN_DEVICES) == 101_376


def test_only_dq_without_atomics_is_the_same_in_every_run() -> None:
    for mode in DqMode:
        cfg = replace(SMALL, dq=mode)
        assert FAMILY.is_deterministic(cfg) == (mode == DqMode.TWO_KERNELS)


def test_every_problem_of_the_grid_has_configs() -> None:
    covered = covering_backward_cases("mma_sync_backward")
    assert {case.d for case in covered} > {40, 160}
    for case in covered:
        assert case.config.d_head >= case.d
        assert not case.deterministic or case.config.dq == DqMode.TWO_KERNELS


def test_the_set() -> None:
    configs = get_kernel_configs("backward")
    assert len(set(configs)) == len(configs)
    assert all(cfg.family is FAMILY for cfg in configs)
    assert {cfg.d_head for cfg in configs} == set(FAMILY.knob_values["d_head"])


ILLEGAL = {
    "warp_keys_in_mma_steps": {"B_c": 32},
    "warp_queries_in_mma_steps": {"column_warps": 4, "B_r": 32},
    "column_warps_fill_panels": {"column_warps": 4, "d_head": 96},
    "keys_fit_registers": {"d_head": 256},
    "queries_fit_registers": {"d_head": 192, "B_r": 128},
    "warps_share_dq": {"n_warps": 8, "d_head": 96, "B_r": 32, "B_c": 128, "dq": DqMode.ATOMICS},
    "smem_within_limit": {"d_head": 256, "B_r": 128, "n_warps": 8, "column_warps": 2, "stages": 2},
    "d_head_supported": {"d_head": 80},
    "B_r_supported": {"B_r": 48},
    "B_c_supported": {"B_c": 96},
    "n_warps_supported": {"n_warps": 12},
    "column_warps_supported": {"column_warps": 3},
    "stages_supported": {"stages": 3},
}


def test_each_rule_is_broken_by_a_config_of_its_own() -> None:
    assert not broken_rules(SMALL, H200)
    assert set(ILLEGAL) == {rule.name for rule in FAMILY.rules}
    for name, change in ILLEGAL.items():
        assert name in {rule.name for rule in broken_rules(replace(SMALL, **change), H200)}  # type: ignore[arg-type]


# --- C++ -----------------------------------------------------------------------------------------

TABLE = """
#include "mma_sync_backward/config.cuh"
using Config = flashsmith::FlashBackwardKernelConfig;
static Config config_from(const int* v) {{ return {{{members}}}; }}
constexpr bool has_all_fields(const Config& config) {{
    [[maybe_unused]] const auto& [{names}] = config;
    return true;
}}
static_assert(has_all_fields(Config{{}}));
extern "C" void tabulate(const int* configs, int count, int* out) {{
    for (int i = 0; i < count; ++i) {{
        const Config config = config_from(configs + i * {count});
        *out++ = config.keys_smem_bytes();
        *out++ = config.queries_smem_bytes();
        *out++ = config.smem_bytes();
        *out++ = config.dq_rows();
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
    ints = [value for cfg in EVERY for value in cfg.to_ints()]
    found = (ctypes.c_int * (4 * len(EVERY)))()
    ctypes.CDLL(str(library)).tabulate((ctypes.c_int * len(ints))(*ints), len(EVERY), found)
    expected = [
        value
        for cfg in EVERY
        for value in (
            *(cfg.keys_smem_bytes(), cfg.queries_smem_bytes(), cfg.smem_bytes(), cfg.dq_rows),
        )
    ]
    assert list(found) == expected


# What the kernels take for granted, and a change of a legal config that breaks it.
ASSUMPTIONS = {
    "d_head": {"d_head": 80},
    "B_r: 32": {"B_r": 48},
    "B_c": {"B_c": 32},
    "column_warps: d_head": {"column_warps": 4, "d_head": 96},
    "B_r: a warp": {"column_warps": 4, "B_r": 32},
    "dq: the warps": ILLEGAL["warps_share_dq"],
    "stages": {"stages": 3},
    "the tiles need more shared memory": ILLEGAL["smem_within_limit"],
}


@pytest.mark.full
def test_what_the_kernels_take_for_granted_is_asserted(tmp_path: Path) -> None:
    """Each in words of its own; and nothing is said of a legal config."""
    illegal = {text: replace(SMALL, **change) for text, change in ASSUMPTIONS.items()}  # type: ignore[arg-type]
    assert all(rule_bitmask(cfg, H200) for cfg in illegal.values())
    header = "mma_sync_backward/static_kernel_configuration.cuh"

    def failed(configs: Iterable[FlashBackwardKernelConfig]) -> set[str]:
        static = (f"StaticBackwardKernelConfig<{cfg.to_cpp_struct()}>" for cfg in configs)
        return failed_assertions(tmp_path, FAMILY.name, 90, header, static)

    said = failed(illegal.values())
    assert [text for text in illegal if not any(one.startswith(text) for one in said)] == []
    assert failed([SMALL]) == set()
