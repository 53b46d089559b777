"""The supported machines: Linux on x86-64, with or without a GPU."""

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
    """Raises PlatformError, which names this machine, unless it is Linux on x86-64."""
    machine = this_cpu()
    if sys.platform.startswith("linux") and machine == "x86_64":
        return
    raise PlatformError(
        f"this machine is {platform.system()} on {machine or 'an unknown processor'}: "
        "flashsmith runs on Linux x86-64 only (the compiler it installs and the libraries it "
        "builds are for it). On Windows use WSL 2; on macOS a Linux x86-64 container or machine."
    )
