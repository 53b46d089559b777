"""Builds kernel libraries: compiles C++ sources, keeps their PTX and the reports of the compiler,
and publishes the resulting library."""

from __future__ import annotations

from flashsmith.builder.build_progress import BuildEvent, Progress
from flashsmith.builder.kernel_cache import CacheEntry, RemovedLibraries
from flashsmith.builder.kernel_package import installed_package
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.library_lookup import (
    build,
    built_configs,
    built_kernels,
    cache_stamp,
    find_library,
    is_current,
    libraries_for,
    library_for,
)
from flashsmith.builder.manifest import KernelEntry, Manifest
from flashsmith.builder.slow_kernels import count_noted, losses, note_slow, noted_slow
from flashsmith.builder.toolchain import Toolchain, find_toolchain
from flashsmith.builder.trust import checked_path
from flashsmith.builder.user_cache import (
    cache_dir,
    cache_entries,
    cache_path,
    clear,
    discard,
    prune,
    verify,
    verify_in_words,
)

__all__ = [
    "BuildEvent",
    "CacheEntry",
    "KernelEntry",
    "KernelLibrary",
    "Manifest",
    "Progress",
    "RemovedLibraries",
    "Toolchain",
    "build",
    "built_configs",
    "built_kernels",
    "cache_dir",
    "cache_entries",
    "cache_path",
    "cache_stamp",
    "checked_path",
    "clear",
    "count_noted",
    "discard",
    "find_library",
    "find_toolchain",
    "installed_package",
    "is_current",
    "libraries_for",
    "library_for",
    "losses",
    "note_slow",
    "noted_slow",
    "prune",
    "verify",
    "verify_in_words",
]
