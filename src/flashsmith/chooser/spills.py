"""Chosen kernels that the compiler makes slow in some semantics, and what takes their place there.

A config that was measured for one class of problems also serves others, for which its kernel is
compiled again: softcap, windows, packed and partial sequences need more registers. ``spills.json``
has a line for each choice that then spills, or whose products wait for one another; with a config
that does not, if one was at least as fast in turns with it on a problem of those semantics.
``tools/ci/kernel_losses.py`` finds them. What a build of this process showed counts as well.
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
    """What is known of a kernel.

    stored, loaded: spilled bytes a thread. instead: the config in its place, or None. ratio: the
    kernel's time over that of the other, in turns; 0 without one. serialised: whether its products
    wait for one another, which takes several times as long. timed: whether others were timed in
    turns with it, so that without one in its place it is the fastest.
    """

    stored: int
    loaded: int
    instead: Any
    ratio: float
    serialised: bool = False
    timed: bool = True

    @property
    def size(self) -> int:
        """Bytes stored and loaded, as KernelEntry.spill_bytes has them."""
        return self.stored + self.loaded

    def __str__(self) -> str:
        """What is wrong with it, as the rest of a sentence."""
        if self.serialised:
            return "has serialised products here"
        return f"spills {self.size} bytes here"


def known_spill(config: Any, problem: Problem, device: DeviceSpec) -> Spill | None:
    """What is known of a config's kernel for a problem on a device; None if that is not slow, or
    was not looked at.

    Over a cache what a build showed does not count: a sequence has the same bits in every batch,
    whatever was built before.
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
    """The configs that take another's place, with what they are compiled for there."""
    for (_, semantics, _), known in _known().items():
        if known.instead is not None:
            yield known.instead, Semantics.parse(semantics)


def forget_known() -> None:
    """Has the file read again."""
    _known.cache_clear()


@cache
def _known() -> Mapping[tuple[int, str, str], Spill]:
    """By architecture, semantics and short form."""
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
