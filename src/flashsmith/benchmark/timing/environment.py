"""Environment: where and with what a figure was taken."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import flashsmith
from flashsmith.errors import FlashsmithError
from flashsmith.runtime import driver


@dataclass(frozen=True)
class Environment:
    """What a row of figures says about its origin; '' where there is nothing to say.

    gpu: its name; arch: 90 for sm_90; driver: NVIDIA's version; cuda: what the driver offers;
    torch, flashsmith, python: versions; revision: `git describe` of the checkout that flashsmith
    runs from, else a hash of its CUDA sources.
    """

    gpu: str
    arch: int
    driver: str
    cuda: str
    torch: str
    flashsmith: str
    revision: str
    python: str

    @classmethod
    @cache
    def collect(cls, ordinal: int = 0) -> Environment:
        """The environment of this process and GPU ``ordinal``; asked once.

        Raises ArgumentError where there is no such GPU.
        """
        spec = driver.query_gpu(ordinal)
        return cls(
            gpu=spec.name,
            arch=spec.arch,
            driver=_driver_version(),
            cuda=_cuda_version(),
            torch=_torch_version(),
            flashsmith=flashsmith.__version__,
            revision=_revision(),
            python=platform.python_version(),
        )


def _driver_version() -> str:
    """From NVML, else from the kernel module's own file."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # absent or broken, which NVML says with errors of its own
        pass
    return driver.driver_version()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cuda_version() -> str:
    try:
        return "{}.{}".format(*driver.cuda_version())
    except FlashsmithError:
        return ""


def _torch_version() -> str:
    """As PyTorch says it if it is loaded: its own version names its CUDA."""
    loaded = sys.modules.get("torch")
    if loaded is not None:
        return str(loaded.__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _revision() -> str:
    package = Path(flashsmith.__file__).parent
    checkout = package.parents[1]
    if (checkout / ".git").exists() and (checkout / "src" / "flashsmith").samefile(package):
        try:
            command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
            return subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    from flashsmith.builder.sources import tree_hash

    return f"csrc {tree_hash()[:12]}"
