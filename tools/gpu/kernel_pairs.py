"""Pairs: a kernel and a problem; and the kernels of pairs, compiled from two versions of csrc."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ci"))

from same_ptx import canonical, code_digest

from flashsmith.builder import KernelLibrary
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library_build import build_from
from flashsmith.builder.sources import source_hash
from flashsmith.builder.user_cache import cache_dir
from flashsmith.chooser.choice import choose_config
from flashsmith.chooser.winners import WinnersTable
from flashsmith.families import (
    FAMILIES,
    KernelConfig,
    Problem,
    Semantics,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.runtime.libraries import LoadedKernel, load_library

ARCH = 90
RESOURCES = "registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes"


@dataclass(frozen=True)
class Pair:
    """A kernel and a problem that it can compute."""

    config: KernelConfig
    problem: Problem

    @property
    def semantics(self) -> Semantics:
        return self.problem.required_semantics(self.config)

    @property
    def kernel(self) -> tuple[KernelConfig, Semantics]:
        return self.config, self.semantics

    def __str__(self) -> str:
        return f"{self.problem} {self.config} [{self.semantics}]"


Libraries = Mapping[tuple[KernelConfig, Semantics], KernelLibrary]


def first_ranked(
    operations: Collection[str], softcap: bool = False, family: str | None = None
) -> list[Pair]:
    """All configs that rank first in a shipped entry for these operations, with their semantics.

    With ``family``, these are the configs that the chooser chooses from this family alone, for the
    GPUs of the entries. Entries of a d_head that the family has no kernel of are left out.
    """
    found: dict[tuple[KernelConfig, Semantics], Pair] = {}
    for entry in WinnersTable.shipped():
        problem = entry.problem
        if problem.operation not in operations:
            continue
        if softcap:
            problem = replace(problem, semantics=replace(problem.semantics, softcap=True))
        config = parse_kernel_name_into_config(entry.best.config)
        if family is not None:
            device = device_spec(entry.key.gpu)
            if not FAMILIES[family].candidates(problem.dtype, config.head_dims, device, True):
                continue
            config = choose_config(problem, device, family)
        pair = Pair(config, problem)
        found.setdefault(pair.kernel, pair)
    return list(found.values())


def library_of(csrc: Path, configs: set[KernelConfig], semantics: Semantics) -> KernelLibrary:
    """A library of these sources that contains the configs, from the cache or built now."""
    (family,) = {config.FAMILY for config in configs}
    cache, sources = Cache(cache_dir()), source_hash(family, csrc)
    for manifest in cache.manifests():
        held = {kernel.config for kernel in manifest.kernels}
        alike = manifest.source_hash == sources and manifest.arch == ARCH
        if alike and manifest.semantics == semantics and configs <= held:
            library = cache.open(manifest.key)
            if library is not None:
                return library
    return build_from(csrc, configs, arch=ARCH, semantics=semantics)


def libraries_of(csrc: Path, pairs: Iterable[Pair]) -> Libraries:
    """By pair, the library with its kernel."""
    wanted: dict[tuple[str, Semantics], set[KernelConfig]] = {}
    for pair in pairs:
        wanted.setdefault((pair.config.FAMILY, pair.semantics), set()).add(pair.config)
    found: dict[tuple[KernelConfig, Semantics], KernelLibrary] = {}
    for (family, semantics), configs in wanted.items():
        library = library_of(csrc, configs, semantics)
        print(f"{csrc}: {len(library)} kernels, {family}, {semantics}", flush=True)
        found |= {(config, semantics): library for config in configs}
    return found


def loaded(libraries: Libraries) -> dict[tuple[KernelConfig, Semantics], LoadedKernel]:
    """The kernels in the libraries; each library is loaded once."""
    by_path = {library.path: library for library in libraries.values()}
    kernels = {path: load_library(library) for path, library in by_path.items()}
    return {key: kernels[library.path][key[0]] for key, library in libraries.items()}


def changed_resources(base: Libraries, new: Libraries) -> Iterator[str]:
    """Lines about those figures of the compiler that differ for the new kernels."""
    for key, library in new.items():
        before, now = (one.entry(key[0]) for one in (base[key], library))
        for name in RESOURCES:
            if getattr(before, name) != getattr(now, name):
                change = f"{getattr(before, name)} -> {getattr(now, name)}"
                yield f"{name} {change}: {key[0]} [{key[1]}]"


def changed_pairs(pairs: Collection[Pair], base: Libraries, new: Libraries) -> list[Pair]:
    """The pairs whose kernels have other machine code in the two libraries."""
    with ThreadPoolExecutor() as pool:
        same = pool.map(partial(_is_same_code, base, new), pairs)
        return [pair for pair, alike in zip(pairs, same, strict=True) if not alike]


def _is_same_code(base: Libraries, new: Libraries, pair: Pair) -> bool:
    before, now = (_all_ptx(one[pair.kernel], pair.config) for one in (base, new))
    if len(before) != len(now):
        return False
    return all(
        canonical(one) == canonical(other) or code_digest(one) == code_digest(other)
        for one, other in zip(before, now, strict=True)
    )


def _all_ptx(library: KernelLibrary, config: KernelConfig) -> list[str]:
    """The PTX of all kernels that the config launches."""
    return [library.ptx(config), *library.ptx_beside(config).values()]
