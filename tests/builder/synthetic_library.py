"""Published libraries without a compiler: the cache does not care what is in the files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from stand_in_sources import CONFIGS

from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.manifest import FileRecord, KernelEntry, Manifest
from flashsmith.families import Semantics


def key_of(name: str) -> str:
    """The key that stands for ``name`` in a test."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


PTX = "// not PTX, but a file like any other\n" * 100


def make_manifest(key: str, folder: Path, source_hash: str = "s" * 32, arch: int = 80) -> Manifest:
    """The manifest of a library with two kernels whose files lie in ``folder``."""
    kernels = tuple(
        KernelEntry(
            config=cfg,
            short_form=cfg.short_form(),
            ptx_entry=f"_Z{cfg.kernel_name()}",
            ptx_file=f"ptx/{cfg.kernel_name()}.ptx",
            registers=128,
            stack_bytes=0,
            spill_store_bytes=8 * i,
            spill_load_bytes=4 * i,
            static_smem_bytes=0,
            compile_seconds=0.5,
            ptx_bytes=len(PTX),
            code_bytes=4096,
        )
        for i, cfg in enumerate(CONFIGS)
    )
    paths = (path for path in folder.rglob("*") if path.is_file())
    files = sorted(str(path.relative_to(folder)) for path in paths)
    return Manifest(
        key=key,
        family="mma_sync",
        semantics=Semantics(),
        arch=arch,
        source_hash=source_hash,
        package_version="0.1.0",
        nvcc_version="13.0.88",
        gxx_version="12.2.0",
        tvm_ffi_version="0.1.15",
        flags=("-O3", "-std=c++20"),
        created="2026-01-01T00:00:00+00:00",
        build_seconds=1.5,
        kernels=kernels,
        files={name: FileRecord.of(folder, name) for name in files},
    )


def publish(
    cache: Cache, name: str, *, size: int = 1000, used: float | None = None
) -> KernelLibrary:
    """Publish the library ``key_of(name)`` of ``size`` bytes and some, last used at ``used`` (epoch
    seconds)."""
    key = key_of(name)
    with cache.building(key, lambda seconds: None), cache.temporary_folder() as temporary:
        folder = temporary / "library"
        (folder / "ptx").mkdir(parents=True)
        (folder / "library.so").write_bytes(os.urandom(size))
        for cfg in CONFIGS:
            (folder / "ptx" / f"{cfg.kernel_name()}.ptx").write_text(PTX)
        library = cache.publish(folder, make_manifest(key, folder))
    if used is not None:
        os.utime(library.path / "lock", (used, used))
    return library
