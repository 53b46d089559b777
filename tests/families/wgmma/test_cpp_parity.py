"""The C++ side says the same of thousands of wgmma configs: fields, shared memory, residency,
order."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest
from hopper_samples import SHIPPED, random_configs
from static_assertions import failed_assertions

from flashsmith.families import (
    HOPPER_KNOB_VALUES,
    HopperForwardKernelConfig,
    PingPong,
    device_spec,
    get_hopper_configs,
    legal_completions,
    rule_bitmask,
)

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "src" / "flashsmith" / "csrc"
H200 = device_spec("H200")
FIELDS = [knob.name for knob in fields(HopperForwardKernelConfig)]


def generated_fields() -> str:
    """Designators must stand in the order of the members, and names for members be as many."""
    members = ", ".join(
        f".{name} = static_cast<decltype(Config::{name})>(v[{place}])"
        for place, name in enumerate(FIELDS)
    )
    names = ", ".join(f"m{place}" for place in range(len(FIELDS)))
    return (
        f"constexpr int kFields = {len(FIELDS)};\n"
        f"constexpr Config config_from(const int* v) {{ return {{{members}}}; }}\n"
        f"constexpr bool has_all_fields(const Config& config) {{\n"
        f"    [[maybe_unused]] const auto& [{names}] = config;\n    return true;\n}}\n"
    )


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("hopper_table")
    (folder / "fields.inc").write_text(generated_fields())
    library, source = folder / "table.so", HERE / "config_table.cc"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    includes = [f"-I{folder}", f"-I{CSRC}"]
    subprocess.run(["g++", *flags, *includes, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def configs() -> list[HopperForwardKernelConfig]:
    """The neighbours of legal configs, in every knob and every value; and draws from beyond."""
    wide = replace(SHIPPED, d_head=256, B_r=128, B_c=80, n_warpgroups=2, q_buffers=1)
    near = {
        replace(cfg, **{knob: value})  # type: ignore[arg-type]
        for cfg in (*get_hopper_configs(), replace(wide, consumer_registers=240))
        for knob, values in HOPPER_KNOB_VALUES.items()
        for value in values
    }
    return sorted(near) + random_configs(8_000, seed=20)


def packed(configs: list[HopperForwardKernelConfig]) -> ctypes.Array[ctypes.c_int]:
    ints = [value for cfg in configs for value in cfg.to_ints()]
    return (ctypes.c_int * len(ints))(*ints)


def fits(cfg: HopperForwardKernelConfig) -> bool:
    return cfg.smem_bytes() < 2**62 and cfg.n_threads < 2**31


def test_shared_memory_agrees(table: ctypes.CDLL, configs: list[HopperForwardKernelConfig]) -> None:
    sample = [cfg for cfg in configs if fits(cfg)]
    sizes = (ctypes.c_longlong * len(sample))()
    table.tabulate_smem_bytes(packed(sample), len(sample), sizes)
    assert list(sizes) == [cfg.smem_bytes() for cfg in sample]


@pytest.mark.parametrize("registers", [0, 1, 96, 128, 160, 168, 169, 240, 255])
def test_ctas_per_sm_agree(
    table: ctypes.CDLL, configs: list[HopperForwardKernelConfig], registers: int
) -> None:
    small = next(legal_completions(SHIPPED, ("dtype",), H200))
    sample = [small, *(cfg for cfg in configs[::3] if fits(cfg))]
    ctas = (ctypes.c_int * len(sample))()
    max_smem = H200.max_smem_per_sm
    table.tabulate_ctas(packed(sample), len(sample), max_smem, registers, ctas)
    expected = [cfg.num_ctas_per_sm(max_smem, registers or None) for cfg in sample]
    assert list(ctas) == expected
    # 256 threads with 128 registers each take half of the register file.
    assert (max(expected) > 1) == (registers <= 128)


def test_both_sides_order_configs_in_the_same_way(table: ctypes.CDLL) -> None:
    sample = sorted([*random_configs(40, seed=3), *get_hopper_configs()])
    rows = [packed([cfg]) for cfg in sample]
    for left, right in product(range(len(sample)), repeat=2):
        expected = (sample[left] > sample[right]) - (sample[left] < sample[right])
        assert table.compare(rows[left], rows[right]) == expected


# What the kernel takes for granted, and a change of a legal config that breaks it.
ASSUMPTIONS = {
    "d_head": {"d_head": 80},
    "B_r": {"B_r": 128},
    "B_c": {"B_c": 72},
    "q_buffers": {"q_buffers": 3, "B_c": 32},
    "the tiles need more shared memory": {"kv_stages": 8},
    "registers: setmaxnreg": {"producer_registers": 30},
    "registers: setmaxnreg waits": {"consumer_registers": 240},
    "pingpong": {"pingpong": PingPong.GEMM, "n_warpgroups": 1, "B_r": 64},
    "cluster_size": {"cluster_size": 4},
    "early_exp": {"early_exp": True},
    "stale_max": {"stale_max": True, "rescale_threshold": 0},
    "direct_O": {"direct_O": True, "separate_O": True, "B_c": 32},
    "split_keys": {"split_keys": 2, "cluster_size": 2},
}


def test_what_the_kernel_takes_for_granted_is_asserted(tmp_path: Path) -> None:
    """Each in words of its own; and nothing is said of a legal config."""
    legal = SHIPPED
    illegal = {text: replace(legal, **change) for text, change in ASSUMPTIONS.items()}  # type: ignore[arg-type]
    assert rule_bitmask(legal, H200) == 0
    assert all(rule_bitmask(cfg, H200) for cfg in illegal.values())
    place = (tmp_path, "wgmma", 90, "wgmma/static_kernel_configuration.cuh")

    def failed(configs: Iterable[HopperForwardKernelConfig]) -> set[str]:
        static = (f"StaticHopperKernelConfig<{cfg.to_cpp_struct()}>" for cfg in configs)
        return failed_assertions(*place, static)

    said = failed(illegal.values())
    assert [text for text in illegal if not any(one.startswith(text) for one in said)] == []
    assert failed([legal]) == set()
