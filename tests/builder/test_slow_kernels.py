"""Kernels that the compiler made slow are built, reported, and noted for those who choose."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hopper_sources import FAULTY_B_C, write_hopper_sources
from shipped_kernels import shipped_kernels

from flashsmith.builder import KernelEntry, find_library
from flashsmith.builder.library_build import build_from
from flashsmith.builder.manifest import AdditionalKernel, Manifest
from flashsmith.builder.ptxas_report import nameless_warnings, parse_ptxas_report
from flashsmith.builder.slow_kernels import losses, slow_kernels
from flashsmith.families import (
    Semantics,
    get_hopper_configs,
    parse_kernel_name_into_config,
)

MMA_SYNC = "(FP16, 128, 64, 64, 4): load_0_0_0_tiles"
SHIPPED = next(cfg for cfg in get_hopper_configs() if cfg.B_c == FAULTY_B_C)
UNSHIPPED = replace(SHIPPED, kv_stages=1)
WELL = replace(UNSHIPPED, B_c=96)

# As ptxas 13.0 says it, of two kernels.
REPORT = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function '_Z1a'
ptxas info    : (C7519) warpgroup.arrive is injected in around line 800 by compiler to allow use of registers in GMMA in function '_Z1b'
ptxas info    : (C7519) warpgroup.arrive is injected in around line 813 by compiler to allow use of registers in GMMA in function '_Z1b'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1a' for 'sm_90a'
ptxas info    : Function properties for _Z1a
    672 bytes stack frame, 3160 bytes spill stores, 3100 bytes spill loads
ptxas info    : Used 96 registers, used 16 barriers, 672 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z1b' for 'sm_90a'
ptxas info    : Function properties for _Z1b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 16 barriers
"""  # noqa: E501

SERIALIZED = (
    "C7511: wgmma.mma_async instructions are serialized due to insufficient register resources "
    "for the wgmma pipeline"
)
INJECTED = "C7519: warpgroup.arrive is injected by compiler to allow use of registers in GMMA"


def test_warnings_go_to_the_kernel_they_name() -> None:
    reports = parse_ptxas_report(REPORT)
    assert reports["_Z1a"].warnings == (SERIALIZED,)
    assert reports["_Z1b"].warnings == (INJECTED,)
    assert nameless_warnings(REPORT) == (
        "C7508: 'setmaxnreg' ignored; unable to determine register count at entry.",
    )
    assert nameless_warnings(REPORT.split("\n", 1)[1]) == ()


def entry(config, *warnings: str, spilled: int = 0) -> KernelEntry:
    sizes = (128, 0, spilled, spilled, 0, 1.0, 10, 10)
    return KernelEntry(config, str(config), "_Z1k", "ptx/k.ptx", *sizes, warnings)


def test_what_counts_as_a_loss() -> None:
    assert losses(entry(SHIPPED)) == losses(entry(SHIPPED, INJECTED)) == []
    assert losses(entry(SHIPPED, SERIALIZED)) == [SERIALIZED]
    assert losses(entry(SHIPPED, "C7512: 'setmaxnreg' ignored to maintain compatibility")) != []
    assert losses(entry(SHIPPED, spilled=8)) == [
        "8 bytes of registers are spilled and 8 loaded back per thread"
    ]


def beside(*warnings: str, registers: int = 32, spilled: int = 0) -> AdditionalKernel:
    sizes = (registers, 0, spilled, spilled, 0, 10, 10)
    return AdditionalKernel("combine", "_Z1c", "ptx/c.ptx", *sizes, warnings)


def test_a_loss_of_a_kernel_beside_the_main_one_counts() -> None:
    well = replace(entry(SHIPPED), beside=(beside(),))
    assert losses(well) == []
    assert not well.spills
    slow = replace(entry(SHIPPED, spilled=8), beside=(beside(SERIALIZED, spilled=24),))
    assert losses(slow) == [
        f"combine: {SERIALIZED}",
        "8 bytes of registers are spilled and 8 loaded back per thread",
        "combine: 24 bytes of registers are spilled and 24 loaded back per thread",
    ]
    only_beside = replace(entry(SHIPPED), beside=(beside(spilled=24),))
    assert only_beside.spills
    assert only_beside.most_spilling is only_beside.beside[0]
    assert slow_kernels([well, only_beside]) == [only_beside]


def test_the_one_number_of_registers_is_the_largest() -> None:
    assert replace(entry(SHIPPED), beside=(beside(registers=200),)).most_registers == 200
    assert replace(entry(SHIPPED), beside=(beside(registers=32),)).most_registers == 128


def test_spills_matter_to_some_families_only() -> None:
    mma_sync = entry(parse_kernel_name_into_config(MMA_SYNC), spilled=8)
    slow, injected = entry(SHIPPED, SERIALIZED, spilled=4), entry(SHIPPED, INJECTED)
    assert slow_kernels([mma_sync, slow, injected]) == [slow]


def test_a_table_ships_what_it_ranks(tmp_path) -> None:
    ranked = [
        {"family": "wgmma", "config": str(UNSHIPPED)},
        {"family": "mma_sync", "config": MMA_SYNC},
    ]
    row = {"problem": "b2 s1000 h16 d128 fp16 causal", "ranked": ranked}
    (tmp_path / "gpu.json").write_text(json.dumps({"entries": [row]}))
    added = shipped_kernels(tmp_path) - shipped_kernels(tmp_path / "none")
    causal = Semantics("causal", uneven=True)
    assert added == {(UNSHIPPED, causal), (parse_kernel_name_into_config(MMA_SYNC), causal)}
    assert (SHIPPED, Semantics()) in shipped_kernels()


# ---- with the real compiler ----


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("serialized", "wgmma.mma_async instructions are serialized due to"),
        pytest.param("setmaxnreg", "'setmaxnreg' ignored", marks=pytest.mark.full),
        ("spills", "bytes of registers are spilled"),
    ],
)
def test_a_shipped_kernel_with_a_fault_is_built_and_reported(fault, words, cache, tmp_path) -> None:
    """A user's call never fails for what a compiler made slow."""
    csrc = write_hopper_sources(tmp_path / "csrc", fault)
    assert SHIPPED.B_c == FAULTY_B_C
    events = []
    library = build_from(csrc, [SHIPPED], arch=90, jobs=1, progress=events.append)
    assert words in " ".join(losses(library.entry(SHIPPED)))
    warnings = [event.message for event in events if event.stage == "warn"]
    assert any(str(SHIPPED) in warning for warning in warnings)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("serialized", "are serialized", marks=pytest.mark.full),
        ("setmaxnreg", "'setmaxnreg' ignored"),
    ],
)
def test_the_fault_of_another_kernel_is_recorded_and_reported(
    fault, words, cache_root, tmp_path
) -> None:
    """Of two kernels compiled together the faulty one has the warning, though ptxas may not name
    it."""
    csrc = write_hopper_sources(tmp_path / "csrc", fault)
    events = []
    library = build_from(csrc, [UNSHIPPED, WELL], arch=90, jobs=1, progress=events.append)
    assert library.entry(WELL).warnings == ()
    (warning, *_) = losses(library.entry(UNSHIPPED))
    assert words in warning
    warnings = [event.message for event in events if event.stage == "warn"]
    assert warnings == [
        f"1 of 2 configs are slow as compiled by nvcc {library.manifest.nvcc_version}; first is "
        f"{UNSHIPPED}: {warning}"
    ]
    again = Manifest.from_json((library.path / "manifest.json").read_text())
    assert again == library.manifest
    assert find_library(UNSHIPPED, arch=90) is None  # these are no sources of the package's
