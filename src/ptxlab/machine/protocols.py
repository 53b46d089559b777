"""The interfaces through which the parts of a wave use the wave.

A wave consists of barriers, memories, wgmma and so on. Each part uses the narrowest of these
protocols that suffices, so that no part depends on the whole wave.
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
    """The wave's CTAs, their observers, and the reporting of misuse."""

    geometry: Geometry
    observers: Sequence[Observer]

    def tick(self) -> int:
        """The next event's clock."""

    def misuse(
        self, kind: str, site: Site, threads: np.ndarray, message: str, address: int = 0
    ) -> None:
        """Reports a broken rule: a finding if an observer handles misuse, otherwise an error."""

    def current_site(self) -> Site | None:
        """The instruction that generated code is executing; only for reports."""


class Notifier(Protocol):
    """The scheduler, for parts that do not run groups."""

    random: RandomSchedule | None

    def notify(self) -> None:
        """Signals an event that groups may be waiting for."""


class Wakes(Reports, Protocol):
    """Reports that can also wake waiting groups."""

    @property
    def scheduler(self) -> Notifier:
        """The wave's scheduler."""


class HoldsShared(Wakes, Protocol):
    """Wakes that also holds the shared memories of the CTAs."""

    shared: BankedMemory


class RunsWgmma(HoldsShared, Protocol):
    """HoldsShared that also knows the tensor cores whose rounding applies; None: float32 sums."""

    tensor_core: TensorCore | None


class HoldsMemories(HoldsShared, Protocol):
    """HoldsShared that also holds global memory, with the address of the kernel's arguments."""

    memory: GlobalMemory
    masks_bad_access: bool
    parameter_address: np.uint64
    random: RandomSchedule | None


class PendingWgmma(Protocol):
    """A wgmma that its group has not waited for."""

    site: Site
    clock: int

    @property
    def fragment(self) -> tuple[str, ...]:
        """Registers of A; empty if A is in shared memory."""
