"""The C++ side says the same of thousands of configs: shared memory, residency, order."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from config_samples import random_configs
from cpp_side import check_assumptions, compiled, packed

from flashsmith.families import (
    KNOB_VALUES,
    KNOWN_DEVICES,
    RULES,
    FlashForwardKernelConfig,
    get_cover_configs,
)

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("config_table")
    return compiled(HERE / "config_table.cc", folder / "table.so")


@pytest.fixture(scope="module")
def configs() -> list[FlashForwardKernelConfig]:
    """For each rule every combination of the knobs that it reads; the neighbours of legal configs;
    and 20,000 draws from beyond.
    """
    base = {knob: values[0] for knob, values in KNOB_VALUES.items()}
    family = {
        FlashForwardKernelConfig(**base | dict(zip(rule.knobs, values, strict=True)))
        for rule in RULES
        for values in product(*(KNOB_VALUES[knob] for knob in rule.knobs))
    }
    near = {
        replace(cfg, **{knob: value})  # type: ignore[arg-type]
        for cfg in get_cover_configs()
        for knob, values in KNOB_VALUES.items()
        for value in values
    }
    return sorted(family | near) + random_configs(20_000, seed=20)


def fits_an_int(cfg: FlashForwardKernelConfig) -> bool:
    return cfg.smem_bytes(4) < 2**31 - 1024 and cfg.n_threads < 2**31


@pytest.mark.parametrize("elem_size", [1, 2, 4])
def test_shared_memory_agrees(
    table: ctypes.CDLL, configs: list[FlashForwardKernelConfig], elem_size: int
) -> None:
    small = [cfg for cfg in configs if fits_an_int(cfg)]
    sizes = (ctypes.c_int * len(small))()
    table.tabulate_smem_bytes(packed(small), len(small), elem_size, sizes)
    assert list(sizes) == [cfg.smem_bytes(elem_size) for cfg in small]


@pytest.mark.parametrize("registers", [0, 1, 8, 9, 64, 96, 128, 160, 168, 169, 255])
@pytest.mark.parametrize("max_smem", sorted({device.max_smem_per_sm for device in KNOWN_DEVICES}))
def test_ctas_per_sm_agree(
    table: ctypes.CDLL, configs: list[FlashForwardKernelConfig], max_smem: int, registers: int
) -> None:
    sample = [cfg for cfg in configs[::7] if fits_an_int(cfg)]
    ctas = (ctypes.c_int * len(sample))()
    table.tabulate_ctas(packed(sample), len(sample), max_smem, registers, ctas)
    assert list(ctas) == [cfg.num_ctas_per_sm(max_smem, registers or None) for cfg in sample]


def test_both_sides_order_configs_in_the_same_way(table: ctypes.CDLL) -> None:
    sample = sorted([*random_configs(60, seed=3), *get_cover_configs()])
    rows = [packed([cfg]) for cfg in sample]
    for left, right in product(range(len(sample)), repeat=2):
        expected = (sample[left] > sample[right]) - (sample[left] < sample[right])
        assert table.compare(rows[left], rows[right]) == expected


# What the kernel takes for granted, and a change of a legal config that breaks it.
ASSUMPTIONS = {
    "d_head": {"d_head": 84},
    "B_r": {"n_warps": 8},
    "B_c": {"B_c": 40},
    "n_warps": {"B_r": 1024, "n_warps": 64},
    "the tiles need more shared memory": {"B_c": 1024},
    "Q_mma_load_K_tiles: 0": {"Q_mma_load_K_tiles": 3, "K_mma_load_K_tiles": 3},
    "K_mma_load_K_tiles: 0": {"Q_mma_load_K_tiles": 0, "K_mma_load_K_tiles": 16},
    "V_mma_load_K_tiles: 0": {"V_mma_load_K_tiles": 8, "mma_double_buffer_loads": True},
    "Q_mma_load_K_tiles: Q and K": {"Q_mma_load_K_tiles": 4},
    "kv_stages": {"kv_stages": 2, "eager_load_blocks": False},
    "ping_pong": {"kv_stages": 2, "ping_pong": True, "B_r": 128, "n_warps": 8},
}


def test_what_the_kernel_takes_for_granted_is_asserted(tmp_path: Path) -> None:
    """Each in words of its own; and nothing is said of a legal config."""
    legal = FlashForwardKernelConfig(
        *(5, 64, 64, 64, 4), async_copy=True, eager_load_blocks=True,
        Q_mma_load_K_tiles=2, K_mma_load_K_tiles=2, V_mma_load_K_tiles=2,
    )  # fmt: skip
    check_assumptions(tmp_path, legal, ASSUMPTIONS)
