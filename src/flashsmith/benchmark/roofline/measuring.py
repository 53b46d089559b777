"""Measures the ceilings of a GPU: compiles the microbenchmarks, checks their output, finds how many
iterations they need, and times them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from flashsmith import env
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.measurement import now
from flashsmith.benchmark.roofline.microbenchmarks import (
    MICROBENCHMARKS,
    CeilingUnavailable,
    Machine,
    Microbenchmark,
    PreparedMicrobenchmark,
    WrongOutput,
)
from flashsmith.benchmark.roofline.roofline import SCALE, Ceiling, Roofline
from flashsmith.benchmark.timing import Protocol, Samples, measure
from flashsmith.builder import find_toolchain
from flashsmith.builder.processes import Command, Finished, run_all
from flashsmith.builder.ptxas_report import ResourceReport, parse_ptxas_report
from flashsmith.builder.scratch import require_plain, scratch_folder
from flashsmith.builder.sources import Sources, package_sources
from flashsmith.errors import ArgumentError, CompileError, LaunchError
from flashsmith.families import DeviceSpec
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.device_array import DeviceArray

# A launch of this duration is long enough for the clock to settle at the power draw of the tensor
# cores.
LAUNCH_MS = 50.0
# The caches are not flushed, because the L2 bandwidth can be measured only with data in the L2. For
# the other kernels, the contents of the caches do not matter.
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
    """Wraps a microbenchmark as an implementation that can be timed; each launch runs ``turns``
    iterations."""

    name: str
    running: PreparedMicrobenchmark
    turns: int

    def launch(self) -> None:
        self.running.launch(self.turns)


class GpuMachine:
    """The machine on which microbenchmarks run: GPU 0, with their sources compiled for it."""

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
    """Measures every ceiling of GPU 0. A launch takes about `launch_ms`.

    A ceiling that cannot be measured is stored without a rate and with the reason; one that fails
    is marked wrong. The remaining ceilings are still measured. `progress` is called with the next
    step, the number of completed steps and the number of all steps.

    Raises ArgumentError for an invalid `launch_ms`, LaunchError without a GPU, and ToolchainError
    or CompileError if compiling fails.
    """
    if not 1 <= launch_ms <= 1000:
        raise ArgumentError(f"ms={launch_ms}: a launch takes from 1 to 1000 ms")
    if driver.gpu_count() == 0:
        raise LaunchError("a roofline is measured on an NVIDIA GPU, but none was found")
    device = driver.query_gpu(0)
    possible = [bench for bench in MICROBENCHMARKS if not bench.absence(device.arch)]
    if progress:
        progress("compiling", 0, len(MICROBENCHMARKS))
    machine = GpuMachine(device, sorted({bench.source for bench in possible} - {""}))
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
    """Measures one ceiling: checks the output of its kernel, then times the kernel."""
    empty = Ceiling(bench.key, bench.unit)
    if absence := bench.absence(machine.device.arch):
        return replace(empty, note=absence)
    try:
        running = bench.start(machine)
        error = running.check()
        turns = _turns_that_take(bench.key, running, launch_ms, timer)
        samples = timer(_Launches(bench.key, running, turns), PROTOCOL)
    except CeilingUnavailable as gap:
        return replace(empty, note=str(gap))
    except (WrongOutput, RuntimeError) as failure:  # RuntimeError: the driver's or PyTorch's
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


def _turns_that_take(
    key: str, running: PreparedMicrobenchmark, launch_ms: float, timer: Timer
) -> int:
    """How many iterations a launch of about `launch_ms` needs.

    The number is calibrated twice, because the first launch may be far too short for an exact
    estimate.
    """
    turns = running.first_turns
    for _ in range(2):
        ms = timer(_Launches(key, running, turns), _ONCE).median_ms
        turns = min(_MAX_TURNS, max(1, round(turns * launch_ms / max(ms, 1e-3))))
    return turns


def _per_sm_clock(per_second: float, clock_mhz: float | None, device: DeviceSpec) -> float | None:
    return per_second / (clock_mhz * 1e6 * device.sm_count) if clock_mhz else None


# --- machine code on a GPU ------------------------------------------------------------------------

_MAX_DYNAMIC_SMEM = 8  # CUfunction_attribute, cuda.h


class GpuModule:
    """A cubin that is loaded on GPU ``ordinal`` until the process ends.

    Raises LaunchError with the message of CUDA if the GPU cannot load it.
    """

    def __init__(self, image: bytes, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self._module = ctypes.c_void_p()
        with driver.current_gpu(ordinal):
            driver.call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(image))

    def kernel(self, name: str, smem_bytes: int = 0) -> GpuKernel:
        """The kernel with this name; its launches have ``smem_bytes`` of dynamic shared memory.

        Raises LaunchError if the module has no such kernel or the GPU has less shared memory.
        """
        function = ctypes.c_void_p()
        with driver.current_gpu(self.ordinal):
            driver.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            driver.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SMEM, smem_bytes)
        return GpuKernel(function, smem_bytes, self.ordinal)


@dataclass(frozen=True)
class GpuKernel:
    """A loaded kernel, with the launch parameters that are the same for all its launches."""

    function: ctypes.c_void_p
    smem_bytes: int
    ordinal: int

    def launch(self, ctas: int, threads: int, *arguments: Any) -> None:
        """Enqueues a launch of ``ctas`` CTAs on the default stream; does not wait.

        Arguments are DeviceArrays, whose addresses are passed, and ctypes numbers.

        Raises LaunchError with the message of CUDA if the launch is refused.
        """
        values: list[Any] = [
            ctypes.c_uint64(value.address) if isinstance(value, DeviceArray) else value
            for value in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        with driver.current_gpu(self.ordinal):
            driver.call(
                "cuLaunchKernel",
                self.function,
                *(ctypes.c_uint(n) for n in (ctas, 1, 1, threads, 1, 1, self.smem_bytes)),
                ctypes.c_void_p(),
                pointers,
                ctypes.c_void_p(),
            )


# --- compiling: seconds, so nothing is kept -------------------------------------------------------

# wgmma instructions exist only for this target.
_TARGETS = {"wgmma": {90: "90a"}}

RooflineKind = Literal["cubin", "ptx"]


def target_of(source: str, arch: int) -> str:
    """The compiler's name of the architecture for a source, such as '90' or '90a'."""
    return _TARGETS.get(source, {}).get(arch, str(arch))


def compile_sources(
    sources: Sequence[str], arch: int, kind: RooflineKind = "cubin"
) -> dict[str, bytes]:
    """Compiles csrc/roofline/<source>.cu for sm_<arch>, and returns the images by source.

    Raises ToolchainError, or CompileError with the message of the compiler. A kernel that spills is
    a CompileError too, because it would not reach the ceiling.
    """
    toolchain = find_toolchain()
    toolchain.check_arch(arch)
    csrc = package_sources()
    require_plain("csrc", csrc)
    reports: dict[str, str] = {}

    def finished(done: Finished) -> None:
        reports[done.command.name] = done.output

    with scratch_folder() as scratch:
        names = [f"roofline/{source}.cu" for source in sources]
        Sources(csrc, names).copy_to(scratch / "csrc")
        commands = [
            Command(
                source,
                (
                    str(toolchain.nvcc),
                    f"-ccbin={toolchain.gxx}",
                    *("-O3", "-std=c++20", f"-{kind}", "-Xptxas=-v", "-Icsrc"),
                    _gencode(target_of(source, arch), kind),
                    f"csrc/roofline/{source}.cu",
                    *("-o", f"{source}.{kind}"),
                ),
            )
            for source in sources
        ]
        run_all(commands, cwd=scratch, jobs=env.jobs(), finished=finished)
        images = {source: (scratch / f"{source}.{kind}").read_bytes() for source in sources}
    if kind == "cubin":
        for source in sources:
            _check_no_spills(source, parse_ptxas_report(reports[source]))
    return images


def _gencode(target: str, kind: RooflineKind) -> str:
    code = f"sm_{target}" if kind == "cubin" else f"compute_{target}"
    return f"-gencode=arch=compute_{target},code={code}"


def _check_no_spills(source: str, reports: dict[str, ResourceReport]) -> None:
    for name, report in reports.items():
        spilled = report.spill_store_bytes + report.spill_load_bytes
        if spilled or report.stack_bytes:
            raise CompileError(
                f"{source}.cu: {name} spills {spilled} bytes and has a stack of "
                f"{report.stack_bytes} bytes per thread; it would not measure its ceiling"
            )
