"""Chosen kernels that spill registers in some semantics, and what takes their place there.

A config that was measured for one class of problems also serves others, for which its kernel is
compiled again: softcap, windows and packed sequences need more registers. ``spills.json`` has a
line for each choice that then spills, with a config that does not, if one was at least as fast in
turns with it on a problem of those semantics.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    Semantics,
    parse_kernel_name_into_config,
)

KNOWN = Path(__file__).with_name("spills.json")


class Spill(NamedTuple):
    """What is known of a kernel.

    stored, loaded: spilled bytes a thread. instead: the config in its place, or None. ratio: the
    kernel's time over that of the other, in turns; 0 without one.
    """

    stored: int
    loaded: int
    instead: Any
    ratio: float

    @property
    def size(self) -> int:
        """Bytes stored and loaded, as KernelEntry.spill_bytes has them."""
        return self.stored + self.loaded


def known_spill(config: Any, problem: Problem, device: DeviceSpec) -> Spill | None:
    """What is known of a config's kernel for a problem on a device; None if that does not spill, or
    was not looked at."""
    return _known().get((device.arch, str(problem.required_semantics(config)), str(config)))


def replacements() -> Iterator[tuple[KernelConfig, Semantics]]:
    """The configs that take another's place, with what they are compiled for there."""
    for (_, semantics, _), known in _known().items():
        if known.instead is not None:
            yield known.instead, Semantics.parse(semantics)


@cache
def _known() -> Mapping[tuple[int, str, str], Spill]:
    """By architecture, semantics and short form."""
    return {
        (one["arch"], one["semantics"], one["config"]): Spill(
            one["stored"],
            one["loaded"],
            one["instead"] and parse_kernel_name_into_config(one["instead"]),
            one["ratio"],
        )
        for one in json.loads(KNOWN.read_text())
    }
