"""The C++ side says the same of thousands of wgmma configs: fields, shared memory, residency,
order."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from cpp_side import check_assumptions, compiled, fields_in_cpp, packed
from hopper_samples import SHIPPED, random_configs

from flashsmith.families import (
    HOPPER_KNOB_VALUES,
    PingPong,
    WgmmaForwardKernelConfig,
    device_spec,
    get_hopper_configs,
    legal_completions,
)

HERE = Path(__file__).parent
H200 = device_spec("H200")


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("hopper_table")
    (folder / "fields.inc").write_text(fields_in_cpp(WgmmaForwardKernelConfig))
    return compiled(HERE / "config_table.cc", folder / "table.so", folder)


@pytest.fixture(scope="module")
def configs() -> list[WgmmaForwardKernelConfig]:
    """The neighbours of legal configs, in every knob and every value; and draws from beyond."""
    wide = replace(SHIPPED, d_head=256, B_r=128, B_c=80, n_warpgroups=2, q_buffers=1)
    near = {
        replace(cfg, **{knob: value})  # type: ignore[arg-type]
        for cfg in (*get_hopper_configs(), replace(wide, consumer_registers=240))
        for knob, values in HOPPER_KNOB_VALUES.items()
        for value in values
    }
    return sorted(near) + random_configs(8_000, seed=20)


def fits(cfg: WgmmaForwardKernelConfig) -> bool:
    return cfg.smem_bytes() < 2**62 and cfg.n_threads < 2**31


def test_shared_memory_agrees(table: ctypes.CDLL, configs: list[WgmmaForwardKernelConfig]) -> None:
    sample = [cfg for cfg in configs if fits(cfg)]
    sizes = (ctypes.c_longlong * len(sample))()
    table.tabulate_smem_bytes(packed(sample), len(sample), sizes)
    assert list(sizes) == [cfg.smem_bytes() for cfg in sample]


@pytest.mark.parametrize("registers", [0, 1, 96, 128, 160, 168, 169, 240, 255])
def test_ctas_per_sm_agree(
    table: ctypes.CDLL, configs: list[WgmmaForwardKernelConfig], registers: int
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
    "d_head": {"d_head": 84},
    "B_r": {"B_r": 128},
    "B_c": {"B_c": 72},
    "q_buffers": {"q_buffers": 3, "B_c": 32},
    "the tiles need more shared memory": {"kv_stages": 8},
    "registers: setmaxnreg": {"producer_registers": 30},
    "registers: setmaxnreg deadlocks": {"consumer_registers": 240},
    "pingpong": {"pingpong": PingPong.GEMM, "n_warpgroups": 1, "B_r": 64},
    "cluster_size": {"cluster_size": 4},
    "early_exp": {"early_exp": True},
    "stale_max": {"stale_max": True, "rescale_threshold": 0},
    "direct_O": {"direct_O": True, "separate_O": True, "B_c": 32},
    "short_block": {"short_block": 64, "B_c": 64},
    "register_Q": {"register_Q": 16},
    "split_keys": {"split_keys": 2, "cluster_size": 2},
}


def test_what_the_kernel_takes_for_granted_is_asserted(tmp_path: Path) -> None:
    """Each in words of its own; and nothing is said of a legal config."""
    check_assumptions(tmp_path, SHIPPED, ASSUMPTIONS)
