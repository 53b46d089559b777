"""Libraries made by the real compilers from the package's own sources."""

from __future__ import annotations

import ctypes
import random
import re
import subprocess

import pytest
import shared_kernels
from stand_in_sources import CONFIGS

import flashsmith.builder as builder
from flashsmith.builder.library_build import build_from
from flashsmith.builder.library_lookup import find_library_from
from flashsmith.builder.ptxas_report import parse_ptxas_report
from flashsmith.families import (
    DEFAULT_DEVICE,
    FlashForwardKernelConfig,
    Semantics,
    get_kernel_progression_configs,
    legal_completions,
)
from flashsmith.semantics.cuda import semantics_numbers

FIRST, *_, BUFFERED, LAST = get_kernel_progression_configs()
shared_kernels.want([FIRST, BUFFERED, LAST])


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Two kernels of the progression, built in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = shared_kernels.with_host_code(tmp_path_factory.mktemp("real") / "cache")
        patch.setenv("FLASHSMITH_CACHE_DIR", str(folder))
        return builder.build([LAST, FIRST])


def tool_output(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_library_loads_and_holds_its_configs(library):
    import tvm_ffi

    module = tvm_ffi.load_module(str(library.so_path))
    held = [FlashForwardKernelConfig(*map(int, ints)) for ints in module.configs()]
    assert held == list(library.configs) == sorted([FIRST, LAST])


def test_the_report_of_each_kernel(library):
    for cfg in library.configs:
        entry = library.entry(cfg)
        assert 64 < entry.registers <= 255
        assert entry.code_bytes > 5000
        assert entry.ptx_bytes == len(library.ptx(cfg))
        assert entry.static_smem_bytes == 0
        assert 0 < entry.compile_seconds < library.manifest.build_seconds


def test_nothing_but_the_bindings_is_visible(library):
    """Two libraries in one process must not find each other's maps, nor a machine's paths."""
    symbols = tool_output("nm", "--dynamic", "--defined-only", library.so_path)
    assert {line.split()[-1][:10] for line in symbols.splitlines()} == {"__tvm_ffi_"}
    kinds = {line.split()[-2] for line in tool_output("nm", library.so_path).splitlines()}
    assert "u" not in kinds  # GNU unique symbols are merged across libraries
    dynamic = tool_output("readelf", "--dynamic", library.so_path)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    assert "libtvm_ffi.so" in needed
    assert not [name for name in needed if "cuda" in name]
    assert not re.search(r"RPATH|RUNPATH", dynamic)


def test_the_ptx_of_each_kernel_stands_alone(library, toolchain, tmp_path):
    """ptxas makes the same kernel of it; sources are named without this machine's folders."""
    for cfg in library.configs:
        ptx, entry = library.ptx(cfg), library.entry(cfg)
        assert re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE) == [entry.ptx_entry]
        files = re.findall(r'\.file\s+\d+ "(.*)"', ptx)
        assert "mma_sync/forward_kernel.cuh" in files
        assert not [name for name in files if name.startswith("/")]
        source = tmp_path / "kernel.ptx"
        source.write_text(ptx)
        ptxas = toolchain.nvcc.parent / "ptxas"
        command = [ptxas, "-v", "-arch=sm_80", "-lineinfo", source, "-o", tmp_path / "out"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert parse_ptxas_report(done.stderr)[entry.ptx_entry].registers == entry.registers


def instructions(ptx: str) -> list[str]:
    """The PTX without its line information: of a shared address nvcc may name one use or another,
    and which one also depends on the kernel's neighbours in the shard."""
    lines = ptx[: ptx.index("\t.file")].splitlines()
    return [line for line in lines if not line.startswith("\t.loc")]


def test_equal_sources_give_equal_ptx(library):
    """Another cache folder, another split into shards, other neighbours: the same kernel."""
    again = shared_kernels.load([LAST, FIRST])
    assert again.path.parent != library.path.parent
    assert len(again) > len(library)
    for cfg in (FIRST, LAST):
        assert instructions(again.ptx(cfg)) == instructions(library.ptx(cfg))


def test_a_library_with_more_serves_those_who_want_less(library, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(library.path.parents[2]))
    monkeypatch.setenv("CUDA_HOME", "/nowhere")  # nothing may be compiled
    assert builder.library_for([LAST]).path == library.path
    assert builder.find_library(FIRST).path == library.path
    assert builder.find_library(BUFFERED) is None
    assert builder.find_library(FIRST, arch=90) is None
    assert builder.built_configs() == tuple(sorted([FIRST, LAST]))


def test_libraries_in_one_process_keep_their_own_maps(cache_root, tiny_csrc):
    libraries = [build_from(tiny_csrc, CONFIGS[:1]), build_from(tiny_csrc, CONFIGS)]
    loaded = [ctypes.CDLL(str(library.so_path), mode=ctypes.RTLD_GLOBAL) for library in libraries]
    assert [code.__tvm_ffi_kernel_count() for code in loaded] == [1, 2]


def test_libraries_are_kept_apart_by_semantics(cache_root, tiny_csrc):
    """Equal configs, each library with kernels, a key and a manifest of its own."""
    kinds = [Semantics(), Semantics("causal"), Semantics("causal", packed=True, uneven=True)]
    libraries = [build_from(tiny_csrc, CONFIGS, semantics=kind) for kind in kinds]
    assert len({library.path for library in libraries}) == len(kinds)
    names = set()
    for kind, library in zip(kinds, libraries, strict=True):
        assert library.manifest.semantics == kind
        found = find_library_from(tiny_csrc, CONFIGS, arch=80, semantics=kind)
        assert found is not None
        assert found.path == library.path
        code = ctypes.CDLL(str(library.so_path))
        checksum = code.__tvm_ffi_semantics_checksum() % 2**32
        assert checksum == semantics_numbers(kind)[0]
        names |= {library.entry(cfg).ptx_entry for cfg in CONFIGS}
    assert len(names) == len(kinds) * len(CONFIGS)
    window = Semantics("window")
    assert find_library_from(tiny_csrc, CONFIGS, arch=80, semantics=window) is None


def test_a_library_for_another_arch(cache_root, tiny_csrc):
    library = build_from(tiny_csrc, CONFIGS, arch=90)
    assert library.manifest.arch == 90
    assert ".target sm_90" in library.ptx(CONFIGS[0])


@pytest.mark.full
def test_every_config_the_rules_accept_compiles(cache_root):
    draw, drawn = random.Random(20), set[FlashForwardKernelConfig]()
    values = FIRST.family.legal_space.values

    def shuffled(knob: str, _: FlashForwardKernelConfig, settled: object) -> list[object]:
        return draw.sample(values[knob], len(values[knob]))

    # The first of each order: there are too many to list them.
    while len(drawn) < 50:
        drawn.add(next(legal_completions(FIRST, (), DEFAULT_DEVICE, shuffled)))
    assert builder.build(drawn).configs == tuple(sorted(drawn))
