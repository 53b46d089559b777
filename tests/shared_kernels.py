"""Kernels that tests need, compiled together: one library for each family, architecture and
semantics.

Each library takes the compiler three seconds in addition to its kernels. So a module declares at
import which kernels its plain run needs. The first test that uses one of them builds all kernels of
the same semantics that any module has declared. Every worker of pytest imports all modules, so all
need the same libraries, and find them in the cache after one worker has built them.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

from flashsmith.builder import KernelLibrary, cache_dir, library_for
from flashsmith.builder.kernel_cache import Cache
from flashsmith.chooser import choose
from flashsmith.families import KernelConfig, Semantics
from flashsmith.runtime.libraries import Key, LoadedKernel, loaded_kernels

_CACHE = cache_dir()
AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)
# Packed kernels are uneven ones.
EVERY_SEMANTICS = [
    Semantics(mask, softcap, packed, uneven)
    for mask, softcap, packed, uneven in product(
        ("none", "causal", "window"), (False, True), (False, True), (False, True)
    )
    if uneven or not packed
]

Group = tuple[str, int, Semantics]
_wanted: dict[Group, set[KernelConfig]] = defaultdict(set)
_later: dict[Group, list[Callable[[], Iterable[KernelConfig]]]] = defaultdict(list)
_built: dict[Group, KernelLibrary] = {}


def want(
    configs: Iterable[KernelConfig], semantics: Semantics | None = None, arch: int | None = None
) -> None:
    """Has these configs' kernels built with the others of these semantics (None: plain), for an
    architecture (None: the oldest that their family runs on)."""
    for cfg in configs:
        _wanted[_group(cfg, semantics, arch)].add(cfg)


def want_chosen(*problems: str, arch: int = 80) -> None:
    """The same for what attention() chooses for problems, in words: of host tensors, unless an
    architecture is given."""
    for words in problems:
        choice = choose(words, arch)
        want([choice.config], choice.problem.required_semantics(choice.config), arch)


def want_later(
    configs: Callable[[], Iterable[KernelConfig]], family: str, semantics: Semantics, arch: int
) -> None:
    """The same for configs that take too long to name while tests are collected."""
    _later[family, arch, semantics].append(configs)


def load(
    configs: Sequence[KernelConfig], semantics: Semantics | None = None, arch: int | None = None
) -> KernelLibrary:
    """Loads the kernels of configs of one family. Those not requested earlier are built separately.

    The library is the one that holds the first config.
    """
    group = _group(configs[0], semantics, arch)
    shared = _library(group)
    alone = [cfg for cfg in configs if shared is None or cfg not in shared]
    if shared is not None:
        loaded_kernels.add(shared)
    if alone:
        library = library_for(alone, arch=group[1], semantics=group[2])
        loaded_kernels.add(library)
    return library if shared is None or configs[0] in alone else shared


def with_host_code(folder: Path, cache: Path = _CACHE) -> Path:
    """A cache folder for a test that needs one of its own: it has the host code that all libraries
    share from another, if that has any by now."""
    home = Cache(cache).root
    if home.is_dir():
        others = shutil.ignore_patterns("libraries", "locks", "tmp")
        shutil.copytree(home, Cache(folder).root, ignore=others)
    return folder


def keep_host_code(folder: Path, cache: Path = _CACHE) -> None:
    """Gives another cache the host code that was compiled in a folder of a test's own, where
    with_host_code() finds it: that of packaged libraries takes a quarter of a minute."""
    others = Cache(cache)
    for compiled in Cache(folder).objects.glob("*.o"):
        name = compiled.stem.rpartition("-")[0]  # without the hash of the content
        if others.object(name) is None:
            others.publish_object(name, compiled)


def with_every_value(configs: Sequence[AnyConfig]) -> list[AnyConfig]:
    """Few of the configs, in which every knob has every value that it has in all of them."""

    def values(cfg: AnyConfig) -> set[tuple[str, object]]:
        return {(knob, getattr(cfg, knob)) for knob in cfg.__dataclass_fields__}

    missing, chosen = set[tuple[str, object]]().union(*map(values, configs)), []
    # The smallest tiles among equals: their kernels compile and run fastest.
    configs = sorted(configs, key=lambda cfg: cfg.d_head * (cfg.B_r + cfg.B_c))
    while missing:
        chosen.append(max(configs, key=lambda cfg: len(values(cfg) & missing)))
        missing -= values(chosen[-1])
    return chosen


def _build_together(build: Callable[[Key], LoadedKernel], key: Key) -> LoadedKernel:
    """What is compiled on its first use comes with the others too, if some module wants it."""
    cfg, arch, semantics = key
    shared = _library((cfg.FAMILY, arch, semantics))
    if shared is None or cfg not in shared:
        return build(key)
    loaded_kernels.add(shared)
    return loaded_kernels.kernels[key]


def _group(cfg: KernelConfig, semantics: Semantics | None, arch: int | None) -> Group:
    return cfg.FAMILY, arch or cfg.OLDEST_ARCH, semantics or Semantics()


def _library(group: Group) -> KernelLibrary | None:
    """What all modules want of a group; None for a test that has a cache of its own."""
    if cache_dir() != _CACHE:
        return None
    if group not in _built:
        for configs in _later.pop(group, []):
            _wanted[group].update(configs())
        if not _wanted[group]:
            return None
        _, arch, semantics = group
        _built[group] = library_for(sorted(_wanted[group]), arch=arch, semantics=semantics)
    return _built[group]


loaded_kernels._build = partial(_build_together, loaded_kernels._build)  # type: ignore[method-assign]
