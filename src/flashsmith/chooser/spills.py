"""Chosen kernels that the compiler makes slow for some semantics, and their replacements.

A config measured for one class of problems also serves other classes. For these its kernel is
compiled again: softcap, windows, packed and partial sequences need more registers. ``spills.json``
has a line for each choice that then spills or has serialised wgmma. The line names a replacement
without this fault, if such a config was at least as fast in alternating timings on such a problem.
``tools/ci/kernel_losses.py`` finds these choices. Slow kernels that this process built are taken
into account too.
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
from flashsmith.operations import DECODE

KNOWN = Path(__file__).with_name("spills.json")


class Spill(NamedTuple):
    """The known facts about a slow kernel.

    stored, loaded: spilled bytes per thread. instead: the replacement config, or None. ratio: the
    kernel's time over the replacement's, timed alternately; 0 without a replacement. serialised:
    whether the compiler serialised the kernel's wgmma, which then takes several times as long.
    timed: whether other kernels were timed against this one; if so and there is no replacement,
    this kernel is the fastest.
    """

    stored: int
    loaded: int
    instead: Any
    ratio: float
    serialised: bool = False
    timed: bool = True

    @property
    def size(self) -> int:
        """Bytes stored and loaded, as in KernelEntry.spill_bytes."""
        return self.stored + self.loaded

    def __str__(self) -> str:
        """The fault, as the rest of a sentence."""
        if self.serialised:
            return "has serialised wgmma here"
        return f"spills {self.size} bytes here"


def known_spill(config: Any, problem: Problem, device: DeviceSpec) -> Spill | None:
    """The fault of a config's kernel for a problem on a device; None if the kernel has no fault or
    was not examined.

    Over a cache, faults found in this process's builds do not count: a sequence must have the same
    bits in every batch, whichever kernels were built before.
    """
    semantics = problem.required_semantics(config)
    known = _known().get((device.arch, str(semantics), str(config)))
    if known is None and problem.operation != DECODE.name:
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
    """The replacement configs, with the semantics for which each is compiled."""
    for (_, semantics, _), known in _known().items():
        if known.instead is not None:
            yield known.instead, Semantics.parse(semantics)


def forget_known() -> None:
    """Read the file again at the next use."""
    _known.cache_clear()


@cache
def _known() -> Mapping[tuple[int, str, str], Spill]:
    """The known spills by architecture, semantics and short form."""
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
