"""Finds a library that contains given configs, in an installed package or in the cache, or builds
one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flashsmith import bundle
from flashsmith.builder.build_progress import Progress
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.kernel_package import installed_package
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.library_spec import kernel_flags, package_version
from flashsmith.builder.manifest import Manifest
from flashsmith.builder.sources import package_sources, source_hash
from flashsmith.builder.toolchain import tvm_ffi_abi, tvm_ffi_version
from flashsmith.builder.user_cache import cache_dir
from flashsmith.families import KernelConfig, Semantics, by_family


def find_library(
    cfg: KernelConfig, *, arch: int = 80, semantics: Semantics | None = None
) -> KernelLibrary | None:
    """Finds a library that contains ``cfg``: in an installed package, otherwise the most recently
    used one in the cache. Returns None if there is no such library. Needs no compiler.

    Only libraries that this version of flashsmith has built from the current sources are used.
    """
    return _find((cfg,), arch, semantics or Semantics())


def _find(
    configs: tuple[KernelConfig, ...], arch: int, semantics: Semantics
) -> KernelLibrary | None:
    package = installed_package(arch)
    found = package.find(configs, semantics) if package is not None else None
    return found or find_library_from(package_sources(), configs, arch=arch, semantics=semantics)


def library_for(
    configs: Iterable[KernelConfig],
    *,
    arch: int = 80,
    semantics: Semantics | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> KernelLibrary:
    """Returns one library that contains all ``configs``: from an installed package, from the cache,
    or built by this call.

    All configs must be of the same family. A library that was found and not built may also contain
    other configs. Finding a library needs no compiler. Raises the errors of ``build``.
    """
    wanted = tuple(configs)
    found = _find(wanted, arch, semantics or Semantics())
    return found or build(wanted, arch=arch, semantics=semantics, jobs=jobs, progress=progress)


def build(
    configs: Iterable[KernelConfig],
    *,
    arch: int = 80,
    semantics: Semantics | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> KernelLibrary:
    """Returns the library of exactly ``configs`` for ``arch`` (80 is sm_80); builds it unless it is
    cached.

    Up to ``jobs`` compilers run in parallel (default: FLASHSMITH_JOBS, else one for each usable
    core). ``progress`` is called in this thread with each event.

    Raises IllegalConfigError before any compiler runs, ToolchainError when no suitable compiler is
    installed, CompileError with the compiler's output, and CacheError when the cache cannot be
    written. Raises PlatformError on platforms that are not supported.
    """
    # Most processes build nothing, and need none of the modules that build.
    from flashsmith.builder.library_build import build_from

    return build_from(
        package_sources(), configs, arch=arch, semantics=semantics, jobs=jobs, progress=progress
    )


def libraries_for(
    configs: Iterable[KernelConfig],
    *,
    arch: int = 80,
    semantics: Semantics | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[KernelConfig, KernelLibrary]:
    """Maps each of ``configs`` to a library that contains it; each family has one library.

    Raises the errors of ``library_for``.
    """
    found: dict[KernelConfig, KernelLibrary] = {}
    for group in by_family(configs):
        library = library_for(group, arch=arch, semantics=semantics, jobs=jobs, progress=progress)
        found |= dict.fromkeys(group, library)
    return found


def built_configs(
    *, arch: int = 80, semantics: Semantics | None = None
) -> tuple[KernelConfig, ...]:
    """All configs for which ``find_library`` finds a library, sorted."""
    wanted = semantics or Semantics()
    manifests = _usable_manifests(package_sources(), arch, wanted)
    found = {kernel.config for manifest in manifests for kernel in manifest.kernels}
    found |= {cfg for cfg, compiled in _installed_kernels(arch) if compiled == wanted}
    return tuple(sorted(found, key=lambda cfg: (cfg.FAMILY, cfg.to_ints())))


def built_kernels(*, arch: int = 80) -> tuple[tuple[KernelConfig, Semantics], ...]:
    """All configs that are built, each with the semantics of its kernel, sorted."""
    manifests = _usable_manifests(package_sources(), arch)
    found = {(kernel.config, m.semantics) for m in manifests for kernel in m.kernels}
    found.update(_installed_kernels(arch))
    return tuple(sorted(found, key=lambda one: (one[0].FAMILY, one[0].to_ints(), one[1])))


def _installed_kernels(arch: int) -> tuple[tuple[KernelConfig, Semantics], ...]:
    package = installed_package(arch)
    return package.kernels if package is not None else ()


def cache_stamp() -> tuple[Path, int]:
    """Returns the folder of the libraries in the cache, and a number that changes when a library is
    published or removed."""
    if bundle.is_copy():
        return bundle.KERNELS, 0
    folder = Cache(cache_dir()).libraries
    try:
        return folder, folder.stat().st_mtime_ns
    except OSError:
        return folder, 0


def find_library_from(
    csrc: Path,
    configs: Iterable[KernelConfig],
    *,
    arch: int,
    semantics: Semantics | None = None,
) -> KernelLibrary | None:
    """Returns the most recently used library in the cache that was made from ``csrc`` and contains
    all ``configs``; None if there is none."""
    wanted = set(configs)
    for manifest in _usable_manifests(csrc, arch, semantics or Semantics()):
        if wanted <= {kernel.config for kernel in manifest.kernels}:
            library = Cache(cache_dir()).open(
                manifest.key
            )  # verifies; None when damaged or removed
            if library is not None:
                return library
    return None


def is_current(manifest: Manifest) -> bool:
    """Whether a library was made from the current sources, by this version of flashsmith, for this
    tvm-ffi.

    The library's tvm-ffi may be any release with the ABI of the installed release, because each
    serving engine requires its own release. The flags must be the same. The versions of compilers
    may differ, since using a library needs no compiler. Libraries that are not current stay in the
    cache, without being used, until they are evicted.
    """
    return _is_of(manifest, _Origin(package_sources()))


def _usable_manifests(csrc: Path, arch: int, semantics: Semantics | None = None) -> list[Manifest]:
    """Returns the manifests of those libraries in the cache that were made from ``csrc``, the most
    recently used first.

    If ``semantics`` is None, libraries of all semantics are included. The result is empty in a
    self-contained copy of flashsmith, which has no cache.
    """
    if bundle.is_copy():
        return []
    origin = _Origin(csrc)
    return [
        m
        for m in Cache(cache_dir()).manifests()
        if m.arch == arch and semantics in (None, m.semantics) and _is_of(m, origin)
    ]


class _Origin:
    """The inputs that a library would have if it were built now: the sources of its family and the
    versions of packages."""

    def __init__(self, csrc: Path) -> None:
        self._csrc, self._hashes = csrc, dict[str, str]()
        self._packages = package_version(), tvm_ffi_abi(tvm_ffi_version())

    def of(self, family: str) -> tuple[str, str, str]:
        if family not in self._hashes:
            self._hashes[family] = source_hash(family, self._csrc)
        return self._hashes[family], *self._packages


def _is_of(manifest: Manifest, origin: _Origin) -> bool:
    abi = tvm_ffi_abi(manifest.tvm_ffi_version)
    made = (manifest.source_hash, manifest.package_version, abi)
    flags = kernel_flags(manifest.family, manifest.arch)
    return made == origin.of(manifest.family) and manifest.flags == flags
