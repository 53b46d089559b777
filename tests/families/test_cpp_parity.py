"""The C++ side says the same of thousands of configs: rules, shared memory, residency, order."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from config_samples import random_configs

from flashsmith.families import (
    DEFAULT_DEVICE,
    KNOB_VALUES,
    KNOWN_DEVICES,
    RULES,
    FlashForwardKernelConfig,
    get_cover_configs,
    rule_bitmask,
)

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "src" / "flashsmith" / "csrc"
LIMITS = sorted({device.max_smem_per_block for device in KNOWN_DEVICES} | {1024, 49152, 65536})


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("config_rules") / "table.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    source = str(HERE / "config_rules_table.cc")
    subprocess.run(["g++", *flags, f"-I{CSRC}", source, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.rule_name.restype = ctypes.c_char_p
    return loaded


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


def packed(configs: list[FlashForwardKernelConfig]) -> ctypes.Array[ctypes.c_int]:
    ints = [value for cfg in configs for value in cfg.to_ints()]
    return (ctypes.c_int * len(ints))(*ints)


def test_both_sides_have_the_same_rules_in_the_same_order(table: ctypes.CDLL) -> None:
    names = [table.rule_name(bit) for bit in range(len(RULES) + 1)]
    assert names == [*(rule.name.encode() for rule in RULES), None]


@pytest.mark.parametrize("limit", LIMITS)
def test_broken_rules_agree(
    table: ctypes.CDLL, configs: list[FlashForwardKernelConfig], limit: int
) -> None:
    device = replace(DEFAULT_DEVICE, max_smem_per_block=limit)
    masks = (ctypes.c_uint * len(configs))()
    table.tabulate_broken_rules(packed(configs), len(configs), limit, masks)
    expected = [rule_bitmask(cfg, device) for cfg in configs]
    differing = [
        str(cfg)
        for cfg, ours, theirs in zip(configs, expected, masks, strict=True)
        if ours != theirs
    ]
    assert differing == []


def test_the_sample_breaks_every_rule_and_keeps_every_rule(
    configs: list[FlashForwardKernelConfig],
) -> None:
    device = replace(DEFAULT_DEVICE, max_smem_per_block=65536)
    masks = [rule_bitmask(cfg, device) for cfg in configs]
    for bit, rule in enumerate(RULES):
        assert 0 < sum(mask >> bit & 1 for mask in masks) < len(masks), rule.name
    assert masks.count(0) > 250


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


def test_both_sides_order_configs_alike(table: ctypes.CDLL) -> None:
    sample = sorted([*random_configs(60, seed=3), *get_cover_configs()])
    rows = [packed([cfg]) for cfg in sample]
    for left, right in product(range(len(sample)), repeat=2):
        expected = (sample[left] > sample[right]) - (sample[left] < sample[right])
        assert table.compare(rows[left], rows[right]) == expected


@pytest.mark.parametrize(("n_warps", "compiles"), [(4, True), (8, False)])
def test_an_illegal_config_fails_its_static_assert(
    tmp_path: Path, n_warps: int, compiles: bool
) -> None:
    cfg = FlashForwardKernelConfig(5, 128, 64, 64, n_warps)
    source = tmp_path / "kernel.cc"
    source.write_text(
        '#include "mma_sync/config_rules.cuh"\nnamespace flashsmith {\n'
        "template <FlashForwardKernelConfig CFG> struct Kernel {\n"
        '  static_assert(broken_rules(CFG, 166912) == 0, "illegal config");\n};\n'
        f"template struct Kernel<{cfg.to_cpp_struct()}>;\n}}\n"
    )
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{CSRC}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == compiles
    assert ("illegal config" in done.stderr) != compiles
