"""The recipe of a library: everything its content depends on, and the key that sums it up."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flashsmith.builder.manifest import FORMAT
from flashsmith.builder.toolchain import Toolchain
from flashsmith.families import KernelConfig, Semantics, device_spec, family_named

_SOURCE_SUFFIXES = (".cu", ".cuh", ".cc", ".h")
# Below csrc; its other folders hold programs of their own.
_SOURCE_FOLDERS = ("host", "common", "mma_sync", "wgmma")

# Hidden and without GNU unique symbols: several libraries live in one process, and each must keep
# the `forward_kernels` map of its own.
_HOST_FLAGS = ("-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")
# -O1: the bindings run once a launch, and -O2 makes the first build 1.5 s longer.
_GXX_FLAGS = ("-O1", "-std=c++20", *_HOST_FLAGS)
_NVCC_FLAGS = ("-O3", "-std=c++20", "-Xcompiler", ",".join(_HOST_FLAGS))


def package_sources() -> Path:
    """The CUDA C++ sources that came with the package."""
    return Path(__file__).parents[1] / "csrc"


def package_version() -> str:
    """The installed flashsmith's version."""
    return importlib.metadata.version("flashsmith")


def sources_in(csrc: Path) -> list[Path]:
    """All C++ sources of the kernel libraries, sorted."""
    folders = (csrc / name for name in _SOURCE_FOLDERS)
    files = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    return sorted(path for path in files if path.suffix in _SOURCE_SUFFIXES)


def host_sources_in(csrc: Path) -> list[Path]:
    """Those that g++ compiles into every library, sorted."""
    return [path for path in sources_in(csrc) if path.suffix == ".cc"]


def source_hash(csrc: Path) -> str:
    """One hash over the names and texts of all C++ sources in ``csrc``."""
    return _hash_of(read_sources(csrc))


def read_sources(csrc: Path) -> dict[str, bytes]:
    """All C++ sources in ``csrc``, by their names relative to it, in order."""
    return {path.relative_to(csrc).as_posix(): path.read_bytes() for path in sources_in(csrc)}


def copy_sources(csrc: Path, target: Path) -> str:
    """Copy the C++ sources in ``csrc`` to the new folder ``target``; returns their source_hash.

    Compilers call a copy by its original's name: in errors, and in what tells machine code's lines.
    """
    sources = read_sources(csrc)
    for name, text in sources.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f'#line 1 "{csrc / name}"\n'.encode() + text)
    return _hash_of(sources)


def _hash_of(sources: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name, text in sources.items():
        total.update(f"{name}\0{len(text)}\0".encode())
        total.update(text)
    return total.hexdigest()[:32]


def machine_target(family: str, arch: int) -> str:
    """What machine code is for: 'sm_80'."""
    return f"sm_{arch}{family_named(family).target_suffix}"


def kernel_flags(family: str, arch: int) -> tuple[str, ...]:
    """nvcc's flags for kernels: the target, and what the resource report needs."""
    limit = device_spec(arch).max_smem_per_block
    target = machine_target(family, arch)
    return (
        *_NVCC_FLAGS,
        f"-gencode=arch={target.replace('sm', 'compute')},code={target}",
        f"-DFLASHSMITH_MAX_SMEM_PER_BLOCK={limit}",
        "-lineinfo",
        "-Xptxas=-v",
    )


@dataclass(frozen=True)
class Recipe:
    """What to build, from which sources, with which compilers."""

    configs: tuple[KernelConfig, ...]  # sorted, unique
    arch: int
    semantics: Semantics
    csrc: Path
    source_hash: str
    toolchain: Toolchain

    @property
    def family(self) -> str:
        """The kernel family that all the configs are of."""
        return self.configs[0].FAMILY

    @property
    def target(self) -> str:
        """What machine code is for: 'sm_80'."""
        return machine_target(self.family, self.arch)

    def kernel_flags(self) -> tuple[str, ...]:
        """nvcc's flags for the shards."""
        return kernel_flags(self.family, self.arch)

    def host_flags(self) -> tuple[str, ...]:
        """g++'s flags for the host path and the map."""
        return _GXX_FLAGS

    def key(self) -> str:
        """The library's name in the cache."""
        return _hashed(
            [cfg.short_form() for cfg in self.configs],
            self.family,
            self.arch,
            asdict(self.semantics),
            self.kernel_flags(),
            self.common_key(),
        )

    def common_key(self) -> str:
        """The name of the objects that do not depend on configs, semantics or arch."""
        return _hashed(
            FORMAT,
            package_version(),
            self.source_hash,
            self.host_flags(),
            self.toolchain.identity(),
        )


def _hashed(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
