"""The user's kernel cache: finds, lists, checks and empties it."""

from __future__ import annotations

import os
from pathlib import Path

from flashsmith import env
from flashsmith.builder.kernel_cache import Cache, CacheEntry, RemovedLibraries
from flashsmith.builder.kernel_package import installed_package
from flashsmith.builder.library import KernelLibrary
from flashsmith.errors import ArgumentError, CacheError
from flashsmith.pluralize import pluralize


def cache_dir() -> Path:
    """The folder that contains the cache.

    This is FLASHSMITH_CACHE_DIR if it is set, otherwise 'flashsmith' in the user's cache folder.
    The folder may contain other files too; the cache itself is ``cache_path()``.

    Raises CacheError if the user has no home folder, or if the path is not UTF-8.
    """
    folder = _cache_dir()
    try:
        os.fspath(folder).encode()
    except UnicodeEncodeError as error:
        raise CacheError(
            f"the kernel cache cannot be in {os.fspath(folder)!r}: the name is not UTF-8; set "
            "FLASHSMITH_CACHE_DIR to another folder"
        ) from error
    return folder


def _cache_dir() -> Path:
    chosen = env.CACHE_DIR.raw()
    if chosen is not None:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:
            raise CacheError(
                f"FLASHSMITH_CACHE_DIR={chosen!r}: {error}; give a folder that you may write"
            ) from error
    import platformdirs  # not needed to call installed kernels

    try:
        folder = platformdirs.user_cache_path("flashsmith", appauthor=False)
    except RuntimeError:  # Newer platformdirs raises this; older ones return a relative path
        folder = Path("~")
    if not folder.is_absolute():
        raise CacheError(
            "there is no home folder to keep the kernel cache in (HOME is unset); "
            "set HOME, or FLASHSMITH_CACHE_DIR to a folder that you may write"
        )
    return folder


def cache_path() -> Path:
    """The cache itself, a folder in ``cache_dir()`` that contains only what flashsmith made."""
    return Cache(cache_dir()).root


def discard(library: KernelLibrary) -> None:
    """Removes a damaged library, so that the next build replaces it.

    A library of an installed package stays there, but this process does not use it any more.

    Raises CacheError if the library cannot be removed.
    """
    if library.is_installed:
        package = installed_package(library.manifest.arch)
        if package is not None:
            package.forget(library)
        return
    cache = Cache(library.path.parents[2])
    with cache.building(library.manifest.key, lambda seconds: None):
        cache.discard(library.manifest.key)


def cache_entries() -> list[CacheEntry]:
    """All libraries in the cache, the most recently used first."""
    return Cache(cache_dir()).entries()


def prune(limit_mib: float | None = None) -> RemovedLibraries:
    """Evicts the least recently used libraries until the cache has at most ``limit_mib`` MiB.

    The default is FLASHSMITH_CACHE_LIMIT. Raises ArgumentError unless the limit is a number of at
    least 0.
    """
    # Written like this, the condition also rejects NaN, for which every comparison is false.
    if isinstance(limit_mib, str) or (limit_mib is not None and not limit_mib >= 0):
        raise ArgumentError(f"limit_mib={limit_mib!r}: give 0 or more MiB")
    return Cache(cache_dir()).prune(env.cache_limit_mib() if limit_mib is None else limit_mib)


def clear() -> RemovedLibraries:
    """Empties the cache, except for libraries that are in use."""
    return Cache(cache_dir()).clear()


def verify() -> list[CacheEntry]:
    """Checks every file in the cache.

    Returns the damaged entries, which the next build replaces.
    """
    return [entry for entry in Cache(cache_dir()).entries(thorough=True) if entry.damage]


def verify_in_words() -> tuple[list[str], bool]:
    """The findings of verify(), as lines to print, and whether all entries are intact."""
    damaged = verify()
    lines = [f"{entry.path}: {entry.damage}; the next build replaces it" for entry in damaged]
    number = pluralize(len(cache_entries()), "library", "libraries")
    return [*lines, f"{number}, {len(damaged)} damaged"], not damaged
