"""The interfaces through which the parts of a wave use it.

A wave consists of barriers, memories, wgmma and so on. Each of them gets the wave under the
narrowest of these protocols that suffices, so that none of them depends on the whole.
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
    """Which CTAs these are, who watches them, and where broken rules are reported."""

    geometry: Geometry
    observers: Sequence[Observer]

    def tick(self) -> int:
        """The next event's clock."""

    def misuse(
        self, kind: str, site: Site, threads: np.ndarray, message: str, address: int = 0
    ) -> None:
        """A rule is broken: a finding where an observer takes it, an error otherwise."""

    def current_site(self) -> Site | None:
        """The instruction that generated code is at; only for reports."""


class Notifier(Protocol):
    """The scheduler, for parts that do not run groups."""

    random: RandomSchedule | None

    def notify(self) -> None:
        """Something has happened that groups may be waiting for."""


class Wakes(Reports, Protocol):
    """Reports, and can wake groups that wait."""

    @property
    def scheduler(self) -> Notifier:
        """The wave's scheduler."""


class HoldsShared(Wakes, Protocol):
    """And holds the shared memories of the CTAs."""

    shared: BankedMemory


class RunsWgmma(HoldsShared, Protocol):
    """And knows the tensor cores whose sums it takes; None: float32's."""

    tensor_core: TensorCore | None


class HoldsMemories(HoldsShared, Protocol):
    """And holds global memory, where the kernel's arguments begin at an address."""

    memory: GlobalMemory
    masks_bad_access: bool
    parameter_address: np.uint64
    random: RandomSchedule | None


class PendingWgmma(Protocol):
    """What a group keeps of a wgmma that it has not waited for."""

    site: Site
    clock: int

    @property
    def fragment(self) -> tuple[str, ...]:
        """Registers of A, none when it is in shared memory."""
