"""Protocols: the interfaces through which the parts of a wave access the wave.

The parts of a wave are its barriers, memories, wgmma and so on. Each part takes the smallest of
these protocols that it needs, so that no part depends on the whole wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ptxlab.interface import Observer, Site
from ptxlab.machine.geometry import Geometry
from ptxlab.machine.memory import BankedMemory, GlobalMemory
from ptxlab.machine.random_schedule import RandomSchedule
from ptxlab.machine.tensor_cores import TensorCore


class Reports(Protocol):
    """Gives access to the CTAs and observers of the wave, and reports misuse."""

    geometry: Geometry
    observers: Sequence[Observer]

    def tick(self) -> int:
        """Returns the clock of the next event."""

    def misuse(
        self, kind: str, site: Site, threads: np.ndarray, message: str, address: int = 0
    ) -> None:
        """Reports a broken rule: as a finding if an observer handles misuse, otherwise as an
        error."""

    def current_site(self) -> Site | None:
        """Returns the instruction that generated code is executing; used only for reports."""


class Notifier(Protocol):
    """The scheduler, as used by parts of the wave that do not run groups."""

    random: RandomSchedule | None

    def notify(self) -> None:
        """Signals an event for which groups may be waiting."""


class Wakes(Reports, Protocol):
    """The protocol Reports, with the scheduler that can wake waiting groups."""

    @property
    def scheduler(self) -> Notifier:
        """The wave's scheduler."""


class HoldsShared(Wakes, Protocol):
    """The protocol Wakes, with the shared memories of the CTAs."""

    shared: BankedMemory


class RunsWgmma(HoldsShared, Protocol):
    """The protocol HoldsShared, with the tensor cores whose rounding is emulated (None: float32
    sums)."""

    tensor_core: TensorCore | None


class HoldsMemories(HoldsShared, Protocol):
    """The protocol HoldsShared, with global memory and the address of the kernel's arguments."""

    memory: GlobalMemory
    masks_bad_access: bool
    parameter_address: np.uint64
    random: RandomSchedule | None


class PendingWgmma(Protocol):
    """A wgmma for which the Group of threads that issued it has not waited yet."""

    site: Site
    clock: int

    @property
    def fragment(self) -> tuple[str, ...]:
        """The registers of A; empty if A is in shared memory."""
