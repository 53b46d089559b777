"""Chooses the target device of a command: a GPU of this machine, or a known GPU in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flashsmith.families import DEFAULT_DEVICE, DeviceSpec, KernelConfig, device_spec
from flashsmith.families.canonical import emulated_arch
from flashsmith.families.device import default_device
from flashsmith.runtime import driver

Backend = Literal["gpu", "emulator"]


@dataclass(frozen=True)
class Target:
    """The device that kernels are built for, and the backend that runs them."""

    device: DeviceSpec
    backend: Backend

    @property
    def arch(self) -> str:
        """The architecture's name, for example 'sm_80'."""
        return f"sm_{self.device.arch}"

    def __str__(self) -> str:
        if self.backend == "gpu":
            return f"{self.arch} on {self.device.name}"
        return f"{self.arch} ({self.device.name}) in the emulator"


def choose_target(
    arch: str | None = None, emulate: bool = False, configs: Sequence[KernelConfig] = ()
) -> Target:
    """Returns the target of a command.

    Without `arch`, the target is the first GPU of this machine. Without a GPU, the target is the
    first known GPU that runs all `configs`, in the emulator: the A100, unless `configs` include
    wgmma kernels. If `arch` ('sm_90', '90', 'H200') is not the architecture of this machine's GPU,
    it is emulated, because machine code for one architecture does not run on another. `emulate`
    always selects the emulator.

    Raises ArgumentError for an unknown arch.
    """
    present = driver.query_gpu(0) if driver.gpu_count() > 0 else None
    if arch is None:
        oldest = max(map(emulated_arch, configs), default=DEFAULT_DEVICE.arch)
        wanted = present or default_device(oldest)
    else:
        wanted = device_spec(arch)
        if present is not None and present.arch == wanted.arch:
            wanted = present
    return Target(wanted, "gpu" if wanted is present and not emulate else "emulator")
