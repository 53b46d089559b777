"""Checks a fake library: every file, every kernel, and the code itself."""

from __future__ import annotations

import ctypes

from stand_in_sources import CONFIGS

from flashsmith.builder import KernelLibrary


def check_stand_in_library(library: KernelLibrary) -> None:
    assert library.configs == tuple(sorted(CONFIGS))
    for cfg in library.configs:
        entry = library.entry(cfg)
        assert f".entry {entry.ptx_entry}(" in library.ptx(cfg)
        assert 0 < entry.registers < 64
        assert not entry.spills
        assert entry.code_bytes > 0
        assert entry.compile_seconds > 0
    code = ctypes.CDLL(str(library.so_path))
    assert code.__tvm_ffi_kernel_count() == len(CONFIGS)
