"""The specification of a library: everything on which the content of the library depends, and the
library's key, which is a hash of the specification."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

from flashsmith import bundle
from flashsmith.builder.manifest import FORMAT
from flashsmith.builder.sources import packaged_sources_hash
from flashsmith.builder.toolchain import Toolchain
from flashsmith.families import KernelConfig, Semantics, device_spec, family_named
from flashsmith.semantics.cuda import semantics_header

# Symbols are hidden and not GNU unique: one process loads several libraries, and each must use its
# own `forward_kernels`.
_HOST_FLAGS = ("-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")
# -O1 is enough: the bindings run once per launch, and -O2 would make the first build 1.5 s longer.
_GXX_FLAGS = ("-O1", "-std=c++20", *_HOST_FLAGS)
_NVCC_FLAGS = ("-O3", "-std=c++20", "-Xcompiler", ",".join(_HOST_FLAGS))
# Undefined symbols are errors. In packaged libraries, undefined symbols are looked for after
# linking instead, since such a library must not depend on libtvm_ffi, which no system provides.
# Packaged libraries have no symbols for debuggers and no build ID.
_LINK_FLAGS = ("-Wl,-z,defs",)
_PACKAGED_LINK_FLAGS = ("-s", "-Wl,--build-id=none")
# The flag for kernels that are not packaged, with which profilers find the source lines of a
# kernel. The line table contains paths of the machine that compiled the kernel, and it is five
# times as large as the machine code.
_LINE_TABLE = "-lineinfo"
# The flag for packaged kernels. The driver decompresses a kernel when the kernel is first used.
_COMPRESSED = "--compress-mode=size"


def package_version() -> str:
    """The version of this flashsmith."""
    return bundle.VERSION or importlib.metadata.version("flashsmith")


def machine_target(family: str, arch: int) -> str:
    """The architecture of the machine code, such as 'sm_80'."""
    return f"sm_{arch}{family_named(family).target_suffix_for(arch)}"


def kernel_flags(family: str, arch: int, *, packaged: bool = False) -> tuple[str, ...]:
    """The flags with which nvcc compiles kernels, including those for the report on resources.

    ``packaged`` kernels have the same machine code, but it is compressed and has no line table.
    """
    limit = device_spec(arch).max_smem_per_block
    target = machine_target(family, arch)
    return (
        *_NVCC_FLAGS,
        f"-gencode=arch={target.replace('sm', 'compute')},code={target}",
        f"-DFLASHSMITH_MAX_SMEM_PER_BLOCK={limit}",
        _COMPRESSED if packaged else _LINE_TABLE,
        "-Xptxas=-v",
    )


@dataclass(frozen=True)
class LibrarySpec:
    """The configs to build, the sources, and the compilers.

    A ``packaged`` library is for a wheel: it runs with older system libraries, and its bytes do not
    depend on where or when it is built.
    """

    configs: tuple[KernelConfig, ...]  # sorted, unique
    arch: int
    semantics: Semantics
    csrc: Path
    source_hash: str  # Hash of the family's sources
    toolchain: Toolchain
    packaged: bool = False

    @property
    def family(self) -> str:
        """The family of the configs."""
        return self.configs[0].FAMILY

    @property
    def target(self) -> str:
        """The architecture of the machine code, such as 'sm_80'."""
        return machine_target(self.family, self.arch)

    def kernel_flags(self) -> tuple[str, ...]:
        """The flags with which nvcc compiles shards."""
        return kernel_flags(self.family, self.arch, packaged=self.packaged)

    def host_flags(self) -> tuple[str, ...]:
        """The flags with which g++ compiles the host code and the map of kernels."""
        # Otherwise the object would contain the version of the compiler.
        return (*_GXX_FLAGS, "-fno-ident") if self.packaged else _GXX_FLAGS

    def link_flags(self) -> tuple[str, ...]:
        """g++'s flags for linking the library."""
        return _PACKAGED_LINK_FLAGS if self.packaged else _LINK_FLAGS

    def key(self) -> str:
        """The name of the library in the cache."""
        return _hashed(
            [cfg.short_form() for cfg in self.configs],
            self.family,
            self.arch,
            self.semantics.to_json(),
            semantics_header(self.semantics),
            self.kernel_flags(),
            self.common_key(),
            *([packaged_sources_hash(self.csrc), self.link_flags()] if self.packaged else []),
        )

    def common_key(self) -> str:
        """A key that is the same for all libraries of the family, whatever their configs, semantics
        and architecture are."""
        return self.object_key(self.source_hash)

    def object_key(self, source_hash: str) -> str:
        """The cache key of host code that is compiled from sources with the given hash; the key
        does not depend on the family."""
        return _hashed(
            FORMAT,
            package_version(),
            source_hash,
            self.host_flags(),
            self.toolchain.identity(),
        )


def _hashed(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
