"""The supported machines: Linux on x86-64 or aarch64, with or without a GPU."""

from __future__ import annotations

import platform
import sys

from flashsmith.errors import PlatformError

# The processors that libraries are built for, as Linux names them.
CPUS = ("x86_64", "aarch64")


def this_cpu() -> str:
    """This machine's processor, as Linux names it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def require_supported_host() -> None:
    """Raises PlatformError, which names this machine, unless it is Linux on one of CPUS."""
    machine = this_cpu()
    if sys.platform.startswith("linux") and machine in CPUS:
        return
    raise PlatformError(
        f"this machine is {platform.system()} on {machine or 'an unknown processor'}: "
        "flashsmith runs on Linux x86-64 and aarch64 only (the compiler it installs and the "
        "libraries it builds are for them). On Windows use WSL 2; on macOS a Linux container or "
        "machine."
    )
