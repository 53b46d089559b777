"""What a command works for: a GPU of this machine, or a known one that the emulator plays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashsmith.configs import DEFAULT_DEVICE, DeviceSpec, device_spec

Backend = Literal["gpu", "emulator"]


@dataclass(frozen=True)
class Target:
    """The device that kernels are built for, and what runs them."""

    device: DeviceSpec
    backend: Backend

    @property
    def arch(self) -> str:
        """For example 'sm_80'."""
        return f"sm_{self.device.arch}"

    def __str__(self) -> str:
        if self.backend == "gpu":
            return f"{self.arch} on {self.device.name}"
        return f"{self.arch} ({self.device.name}) in the emulator"


def choose_target(arch: str | None = None, emulate: bool = False) -> Target:
    """The target of a command.

    Without `arch` the first GPU of this machine, or the A100 in the emulator when there is none.
    An `arch` ('sm_90', '90', 'H200') that is not the GPU's own goes to the emulator: machine code
    for one architecture does not run on another. `emulate` leaves the GPU alone.

    Raises ArgumentError for an unknown arch.
    """
    from flashsmith.runtime.driver import gpu_count, query_gpu

    present = query_gpu(0) if gpu_count() > 0 else None
    if arch is None:
        wanted = present or DEFAULT_DEVICE
    else:
        wanted = device_spec(arch)
        if present is not None and present.arch == wanted.arch:
            wanted = present
    return Target(wanted, "gpu" if wanted is present and not emulate else "emulator")
