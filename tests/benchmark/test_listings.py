"""What is said of kernels that are built: only those that would be used count as such."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashsmith.benchmark.listings import config_facts, entry_facts, print_entries
from flashsmith.benchmark.table import make_console
from flashsmith.builder import CacheEntry, KernelEntry, Manifest
from flashsmith.builder.library_spec import kernel_flags, package_version
from flashsmith.builder.sources import source_hash
from flashsmith.builder.toolchain import tvm_ffi_version
from flashsmith.families import DEFAULT_DEVICE, Semantics, get_kernel_configs
from flashsmith.runtime.target import Target

FIRST, SECOND = get_kernel_configs("prog")[:2]
TARGET = Target(DEFAULT_DEVICE, "emulator")


def library() -> Manifest:
    """A library of FIRST as this version makes them."""
    kernel = KernelEntry(FIRST, str(FIRST), "_Z1k", "ptx/k.ptx", 168, 0, 0, 0, 0, 1.0, 10, 10)
    return Manifest(
        key="k" * 32,
        family="mma_sync",
        semantics=Semantics(),
        arch=DEFAULT_DEVICE.arch,
        source_hash=source_hash("mma_sync"),
        package_version=package_version(),
        nvcc_version="13.0",
        gxx_version="12",
        tvm_ffi_version=tvm_ffi_version(),
        flags=kernel_flags("mma_sync", DEFAULT_DEVICE.arch),
        created="2026-01-01T00:00:00+00:00",
        build_seconds=1.0,
        kernels=(kernel,),
        files={},
    )


def cached(manifest: Manifest | None) -> CacheEntry:
    return CacheEntry("k" * 32, Path("k"), 1, 0.0, manifest, None if manifest else "is gone")


OUTDATED = [
    {"source_hash": "0" * 32},
    {"package_version": "0.0.1"},
    {"tvm_ffi_version": "0.0.1"},
    {"flags": ("-O0",)},
]
OTHERS = [*OUTDATED, {"arch": 90}, {"semantics": Semantics("causal")}]


def test_a_config_of_a_library_that_is_used_is_built() -> None:
    facts = config_facts([FIRST, SECOND], TARGET, [cached(library()), cached(None)])
    assert [fact["built"] for fact in facts] == [True, False]


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: next(iter(change)))
def test_a_library_that_is_not_used_builds_nothing(change: dict) -> None:
    (fact,) = config_facts([FIRST], TARGET, [cached(replace(library(), **change))])
    assert fact["built"] is False


@pytest.mark.parametrize("change", OUTDATED, ids=lambda change: next(iter(change)))
def test_an_outdated_library_is_called_so(change: dict, capsys: pytest.CaptureFixture) -> None:
    entries = [cached(library()), cached(replace(library(), **change)), cached(None)]
    assert [entry_facts(entry)["current"] for entry in entries] == [True, False, None]
    print_entries(make_console(), entries)
    states = [row.split("|")[-2].strip() for row in capsys.readouterr().out.splitlines()[2:]]
    assert states == ["ok", "outdated: built from other sources or versions", "damaged: is gone"]
