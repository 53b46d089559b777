"""Knows which chosen kernels the compiler makes slow for some semantics, and what replaces them.

A config that was measured for one class of problems is also used for other classes, and its kernel
is compiled again for each class. With softcap, windows, packed sequences or partial attention, the
kernel needs more registers. ``spills.json`` has a line for each chosen kernel that spills or has
serialised wgmma in a class. The line names a replacement if another config, without this fault, was
at least as fast on a problem of the class when both were timed alternately.
``tools/ci/kernel_losses.py`` writes these lines. Slow kernels that this process has built are known
as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flashsmith.builder import noted_slow
from flashsmith.builder.slow_kernels import slowing_warnings
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    Semantics,
    parse_kernel_name_into_config,
)

KNOWN = Path(__file__).with_name("spills.json")


class Spill(NamedTuple):
    """The known facts about a slow kernel.

    stored, loaded: the bytes per thread that spills store to memory, and the bytes that they load.
    instead: the config that replaces the slow kernel's config, or None.
    ratio: the time of the kernel divided by the time of the replacement, timed alternately; 0
        without a replacement.
    serialised: whether the compiler serialised the wgmma of the kernel, which makes it several
        times slower.
    timed: whether other kernels were timed against the slow kernel. If they were, and there is no
        replacement, the slow kernel is the fastest.
    """

    stored: int
    loaded: int
    instead: Any
    ratio: float
    serialised: bool = False
    timed: bool = True

    @property
    def size(self) -> int:
        """The bytes stored and loaded, as in KernelEntry.spill_bytes."""
        return self.stored + self.loaded

    def __str__(self) -> str:
        """The fault of the kernel, phrased as the end of a sentence."""
        if self.serialised:
            return "has serialised wgmma here"
        return f"spills {self.size} bytes here"


def known_spill(config: Any, problem: Problem, device: DeviceSpec) -> Spill | None:
    """Returns the known fault of a config's kernel for a problem on a device; None if the kernel
    has no fault or was not examined.

    Over a cache, faults of kernels that this process has built are ignored, because the bits of a
    sequence must not depend on which kernels were built before.
    """
    semantics = problem.required_semantics(config)
    known = _known().get((device.arch, str(semantics), str(config)))
    if known is None and not problem.computed.has_pages:
        return _noted(config, device.arch, semantics)
    return known


def _noted(config: Any, arch: int, semantics: Semantics) -> Spill | None:
    kernel = noted_slow(config, arch, semantics)
    if kernel is None:
        return None
    worst = kernel.most_spilling
    return Spill(
        worst.spill_store_bytes,
        worst.spill_load_bytes,
        instead=None,
        ratio=0,
        serialised=bool(slowing_warnings(kernel)),
        timed=False,
    )


def replacements() -> Iterator[tuple[KernelConfig, Semantics]]:
    """Yields the configs that replace slow configs, each with the semantics for which it is
    compiled."""
    for (_, semantics, _), known in _known().items():
        if known.instead is not None:
            yield known.instead, Semantics.parse(semantics)


def forget_known() -> None:
    """Makes the next use of the known kernels read the file again."""
    _known.cache_clear()


@cache
def _known() -> Mapping[tuple[int, str, str], Spill]:
    """The known slow kernels, keyed by (architecture, semantics, short form)."""
    return {
        (one["arch"], one["semantics"], one["config"]): Spill(
            one["stored"],
            one["loaded"],
            one["instead"] and parse_kernel_name_into_config(one["instead"]),
            one["ratio"],
            one.get("serialised", False),
            one.get("timed", True),
        )
        for one in json.loads(KNOWN.read_text())
    }
