"""Environment: the machine and the software with which something was measured.

Telemetry: the SM clock and the power of a GPU while something runs.

NVML is only read, never used to change settings.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import flashsmith
from flashsmith.errors import FlashsmithError, install_extra
from flashsmith.runtime import driver

INTERVAL_SECONDS = 0.01

# A function that reads a sensor: it returns the SM clock in MHz and the power in W, each None if
# unavailable.
Sensor = Callable[[], tuple[float | None, float | None]]


@dataclass(frozen=True)
class Environment:
    """The machine and software of a measurement, as each row stores them; unknown fields are ''.

    gpu: name of the GPU.
    arch: compute capability, such as 90 for sm_90.
    driver: NVIDIA's driver version.
    cuda: the CUDA version that the driver supports.
    torch, flashsmith, python: versions.
    revision: `git describe` of flashsmith's checkout; without a checkout, a hash of its CUDA
    sources.
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
    def collect(cls, ordinal: int | None = 0) -> Environment:
        """The environment of this process with GPU ``ordinal``; None stands for no GPU.

        The result is cached.

        Raises ArgumentError if that GPU does not exist.
        """
        spec = None if ordinal is None else driver.query_gpu(ordinal)
        return cls(
            gpu=spec.name if spec else "",
            arch=spec.arch if spec else 0,
            driver=_driver_version() if spec else "",
            cuda=_cuda_version() if spec else "",
            torch=_torch_version(),
            flashsmith=flashsmith.__version__,
            revision=_revision(),
            python=platform.python_version(),
        )


def _driver_version() -> str:
    """Returns the version of the driver, from NVML or, without NVML, from a file of the kernel
    module."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML is absent or broken, and raises its own error types
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
    """Returns the version of PyTorch: that of the module, which names the CUDA version, if the
    module is loaded, or else that of the package."""
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


# --- telemetry ---


@dataclass
class Reading:
    """The readings so far. Each property is the median of its readings, or None if there are
    none."""

    clocks: list[float] = field(default_factory=list)
    powers: list[float] = field(default_factory=list)

    @property
    def sm_clock_mhz(self) -> float | None:
        return statistics.median(self.clocks) if self.clocks else None

    @property
    def power_w(self) -> float | None:
        return statistics.median(self.powers) if self.powers else None

    def add(self, clock: float | None, power: float | None) -> None:
        if clock is not None:
            self.clocks.append(clock)
        if power is not None:
            self.powers.append(power)


class Telemetry:
    """Reads the sensors of GPU ``ordinal`` in a thread.

    All readings are None if NVML (the extra 'bench') or its driver is missing, or if NVML does not
    list this GPU. ``absence`` then gives the reason. ``sensor`` replaces NVML, for tests.
    """

    def __init__(self, ordinal: int = 0, *, sensor: Sensor | None = None) -> None:
        self.absence = ""
        self._sensor = sensor
        if sensor is None:
            try:
                self._sensor = _nvml_sensor(ordinal)
            except _Absent as absent:
                self.absence = str(absent)

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """While the block runs, reads the sensor repeatedly; at least once."""
        reading = Reading()
        if self._sensor is None:
            yield reading
            return
        done = threading.Event()
        thread = threading.Thread(
            target=_read, args=(self._sensor, reading, done), name="telemetry", daemon=True
        )
        thread.start()
        try:
            yield reading
        finally:
            done.set()
            thread.join()


def _read(sensor: Sensor, reading: Reading, done: threading.Event) -> None:
    while True:
        reading.add(*sensor())
        if done.wait(INTERVAL_SECONDS):
            return


class _Absent(Exception):
    """Raised if there are no sensors; the message is the reason."""


def _nvml_sensor(ordinal: int) -> Sensor:
    try:
        import pynvml
    except ImportError:
        raise _Absent(
            "SM clock and power are not read: nvidia-ml-py is not installed; "
            + install_extra("bench")
        ) from None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(_pci_bus_id(ordinal))
    except (pynvml.NVMLError, FlashsmithError) as error:
        raise _Absent(f"SM clock and power are not read: {error}") from None

    def read() -> tuple[float | None, float | None]:
        return (
            _asked(pynvml, lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            _asked(pynvml, lambda: _power_milliwatts(pynvml, handle), 1e-3),
        )

    return read


def _asked(pynvml: Any, question: Callable[[], float], factor: float = 1.0) -> float | None:
    try:
        return question() * factor
    except pynvml.NVMLError:
        return None


def _power_milliwatts(pynvml: Any, handle: Any) -> float:
    """The GPU's momentary power draw if the GPU reports it, otherwise the average over up to a
    second."""
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if value.nvmlReturn == pynvml.NVML_SUCCESS:
        return float(value.value.uiVal)
    return float(pynvml.nvmlDeviceGetPowerUsage(handle))


def _pci_bus_id(ordinal: int) -> bytes:
    """The PCI bus ID of GPU ``ordinal``.

    NVML can find a GPU by this ID even if CUDA_VISIBLE_DEVICES renumbers the GPUs.
    """
    device = ctypes.c_int()
    driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
    text = ctypes.create_string_buffer(32)
    driver.call("cuDeviceGetPCIBusId", text, len(text), device)
    return text.value
