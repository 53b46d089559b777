"""Measures a GPU's ceilings: compile, check, find out how many turns take long enough, time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.measurement import now
from flashsmith.benchmark.roofline.ceilings import SCALE, Ceiling, Roofline
from flashsmith.benchmark.roofline.compilation import compile_sources
from flashsmith.benchmark.roofline.exponentials import EXPONENTIALS
from flashsmith.benchmark.roofline.gpu_module import GpuKernel, GpuModule
from flashsmith.benchmark.roofline.library_products import LIBRARY_PRODUCTS
from flashsmith.benchmark.roofline.memory_reads import MEMORY_READS
from flashsmith.benchmark.roofline.microbenchmark import (
    Absent,
    Machine,
    Microbenchmark,
    Running,
    Wrong,
)
from flashsmith.benchmark.roofline.products import PRODUCTS
from flashsmith.benchmark.timing import Protocol, Samples, measure
from flashsmith.errors import ArgumentError, LaunchError
from flashsmith.families import DeviceSpec
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.device_array import DeviceArray

MICROBENCHMARKS: tuple[Microbenchmark, ...] = (
    *LIBRARY_PRODUCTS,
    *PRODUCTS,
    *EXPONENTIALS,
    *MEMORY_READS,
)

# Long enough for the clock to settle under the tensor cores' power.
LAUNCH_MS = 50.0
# The caches stay warm: that is what the L2 is measured with, and nothing else cares.
PROTOCOL = Protocol(
    "one_by_one",
    flush_l2=False,
    num_warmups=2,
    runs=5,
    warmup_ms=200,
    measure_ms=0,
    num_estimates=1,
)
_ONCE = replace(PROTOCOL, num_warmups=0, runs=1, warmup_ms=0)
_MAX_TURNS = 2**31 - 1

Timer = Callable[["_Launches", Protocol], Samples]


@dataclass(frozen=True)
class _Launches:
    """What is timed: launches of so many turns."""

    name: str
    running: Running
    turns: int

    def launch(self) -> None:
        self.running.launch(self.turns)


class Gpu:
    """GPU 0 as a machine for microbenchmarks, with the sources compiled for it."""

    def __init__(self, device: DeviceSpec, sources: Sequence[str]) -> None:
        self.device = device
        self._images = compile_sources(sources, device.arch)
        self._modules: dict[str, GpuModule] = {}

    def kernel(self, source: str, name: str, smem_bytes: int = 0) -> GpuKernel:
        if source not in self._modules:
            self._modules[source] = GpuModule(self._images[source])
        return self._modules[source].kernel(name, smem_bytes)

    def array(self, host: np.ndarray) -> DeviceArray:
        return DeviceArray.from_host(host)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return DeviceArray.empty(shape, dtype)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with driver.current_gpu(0):
            driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value


def measure_roofline(
    launch_ms: float = LAUNCH_MS, progress: Callable[[str, int, int], None] | None = None
) -> Roofline:
    """Every ceiling of GPU 0, each launch taking about `launch_ms`.

    What cannot be measured is a gap with its reason; what fails is marked wrong, and the others are
    measured nevertheless. `progress` is told what comes next, how many are done and of how many.

    Raises ArgumentError for a bad `launch_ms`, LaunchError without a GPU, ToolchainError,
    CompileError.
    """
    if not 1 <= launch_ms <= 1000:
        raise ArgumentError(f"ms={launch_ms}: a launch takes from 1 to 1000 ms")
    if driver.gpu_count() == 0:
        raise LaunchError("a roofline is measured on an NVIDIA GPU, and there is none here")
    device = driver.query_gpu(0)
    possible = [bench for bench in MICROBENCHMARKS if not bench.absence(device.arch)]
    if progress:
        progress("compiling", 0, len(MICROBENCHMARKS))
    machine = Gpu(device, sorted({bench.source for bench in possible} - {""}))
    ceilings = []
    for done, bench in enumerate(MICROBENCHMARKS):
        if progress:
            progress(bench.key, done, len(MICROBENCHMARKS))
        ceilings.append(measure_ceiling(bench, machine, launch_ms))
    return Roofline(
        gpu=device.name,
        arch=device.arch,
        sm_count=device.sm_count,
        time=now(),
        environment=asdict(Environment.collect()),
        ceilings=tuple(ceilings),
    )


def _time(launches: _Launches, protocol: Protocol) -> Samples:
    return measure([launches], protocol)[launches.name]


def measure_ceiling(
    bench: Microbenchmark, machine: Machine, launch_ms: float = LAUNCH_MS, timer: Timer = _time
) -> Ceiling:
    """One ceiling: its kernel's output is checked, then it is timed."""
    empty = Ceiling(bench.key, bench.unit)
    if absence := bench.absence(machine.device.arch):
        return replace(empty, note=absence)
    try:
        running = bench.start(machine)
        error = running.check()
        turns = _turns_that_take(bench.key, running, launch_ms, timer)
        samples = timer(_Launches(bench.key, running, turns), PROTOCOL)
    except Absent as gap:
        return replace(empty, note=str(gap))
    except (Wrong, RuntimeError) as failure:  # the driver's LaunchError, and PyTorch's own
        return replace(empty, wrong=True, note=str(failure))
    per_second = running.work * turns / samples.median_ms * 1e3
    return replace(
        empty,
        rate=per_second / SCALE[bench.unit],
        ms=samples.median_ms,
        spread=samples.spread,
        sm_clock_mhz=samples.sm_clock_mhz,
        power_w=samples.power_w,
        per_sm_clock=_per_sm_clock(per_second, samples.sm_clock_mhz, machine.device),
        error=error,
    )


def _turns_that_take(key: str, running: Running, launch_ms: float, timer: Timer) -> int:
    """How many turns make a launch of about `launch_ms`; the first guess may be far too short."""
    turns = running.first_turns
    for _ in range(2):
        ms = timer(_Launches(key, running, turns), _ONCE).median_ms
        turns = min(_MAX_TURNS, max(1, round(turns * launch_ms / max(ms, 1e-3))))
    return turns


def _per_sm_clock(per_second: float, clock_mhz: float | None, device: DeviceSpec) -> float | None:
    return per_second / (clock_mhz * 1e6 * device.sm_count) if clock_mhz else None
