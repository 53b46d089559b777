"""A compiler and a bench that need no GPU; kernels crash, hang, spill, tie or are wrong on demand.

Worker processes import this file: everything here is pickled to them.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.measurement import Proof
from flashsmith.benchmark.timing import Samples
from flashsmith.families import (
    DeviceSpec,
    DType,
    KernelConfig,
    Problem,
    device_spec,
    get_autotuning_kernel_configs,
)
from flashsmith.tuning.runner import BuildResult, LibraryGoneError, Runner
from flashsmith.tuning.trial import Build

DEVICE = device_spec("H200")
FOREVER = 3600.0


@dataclass(frozen=True)
class Kernel:
    """How a fake kernel behaves. `fails` names the stage at which `how` happens: 'compile',
    'prove', 'check', 'time', 'final' or ''."""

    ms: float = 1.0
    fails: str = ""
    how: str = "abort"
    spill_bytes: int = 0
    registers: int = 128
    compile_seconds: float = 0.0


def _do(how: str) -> None:
    if how == "abort":
        print("a fake abort", flush=True)
        os.abort()
    if how == "hang":
        time.sleep(FOREVER)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "raise":
        raise RuntimeError("an illegal memory access was encountered")


@dataclass
class World:
    """All fake kernels by short form, `default` for others, and how noisy the clock is (relative
    standard deviation)."""

    kernels: dict[str, Kernel]
    default: Kernel = Kernel()
    noise: float = 0.0
    log: Path | None = None
    refuses: tuple[str, ...] = ()
    opens: bool = True
    seconds_per_request: float = 0.0
    # Gone are the libraries of the kernels whose names are in this file; compiling `heals` it.
    gone: Path | None = None
    heals: bool = True
    # Machines have a folder each for the libraries that are there: FAKE_CACHE.
    caches: bool = False

    def kernel(self, build: Build) -> Kernel:
        return self.kernels.get(str(build.config), self.default)

    def note(self, *words: object) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(" | ".join(map(str, words)) + "\n")


def facts_of(
    config: KernelConfig, registers: int, spill_bytes: int = 0, device: DeviceSpec = DEVICE
) -> KernelFacts:
    """What a compiler's report comes to."""
    ctas = config.num_ctas_per_sm(device.max_smem_per_sm, registers)
    return KernelFacts(registers, spill_bytes, 0, config.smem_bytes(), ctas)


PACKED = b"a library, packed"


class FakeLibraries:
    """Those of a machine: files of its own folder."""

    def _path(self, library: str) -> Path:
        return Path(os.environ["FAKE_CACHE"]) / hashlib.sha256(library.encode()).hexdigest()

    def has(self, library: str) -> bool:
        return self._path(library).exists()

    def pack(self, library: str) -> bytes:
        return self._path(library).read_bytes()

    def unpack(self, library: str, packed: bytes) -> None:
        assert packed == PACKED
        self._path(library).parent.mkdir(parents=True, exist_ok=True)
        self._path(library).write_bytes(packed)


@dataclass
class FakeCompiler:
    world: World

    def open(self) -> None:
        pass

    def compile(self, builds: Sequence[Build]) -> list[BuildResult]:
        self.world.note("compile", len(builds))
        if self.world.gone is not None and self.world.heals:
            self.world.gone.write_text("")
        done = []
        for build in builds:
            kernel = self.world.kernel(build)
            time.sleep(kernel.compile_seconds)
            if kernel.fails == "compile":
                if kernel.how == "refuse":
                    done.append(BuildResult(error="nvcc says no"))
                    continue
                _do(kernel.how)
            facts = facts_of(build.config, kernel.registers, kernel.spill_bytes)
            done.append(BuildResult(facts, f"library of {build}"))
            if self.world.caches:
                FakeLibraries().unpack(f"library of {build}", PACKED)
        return done


@dataclass
class FakeBench:
    world: World
    prepared: list[str] = field(default_factory=list)

    def open(self) -> None:
        self.world.note("open", os.getppid())
        if not self.world.opens:
            raise RuntimeError("no CUDA-capable device is detected")

    def prepare(self, problem: Problem) -> None:
        if str(problem) in self.world.refuses:
            raise RuntimeError("out of memory")

    def prove(self, problem: Problem, build: Build, library: str, thorough: bool) -> Proof:
        time.sleep(self.world.seconds_per_request)
        self._find(build, library)
        stage = "check" if thorough else "prove"
        self.world.note(stage, problem, build.config)
        kernel = self.world.kernel(build)
        if kernel.fails == stage:
            if kernel.how == "lie":
                return Proof("fail", "largest error 1 is above 0.001", 1.0, 0.001)
            _do(kernel.how)
        return Proof("pass", "", 1e-4, 1e-3, 1e-4)

    def time(
        self,
        problem: Problem,
        kernels: Sequence[tuple[Build, str]],
        least: int,
        ms: float,
        steady: bool,
    ) -> list[Samples]:
        time.sleep(self.world.seconds_per_request)
        for build, library in kernels:
            self._find(build, library)
        stage = "final" if steady and len(kernels) > 1 else "time"
        self.world.note(stage, problem, *(build.config for build, _ in kernels))
        return [self._samples(problem, build, least, stage) for build, _ in kernels]

    def _find(self, build: Build, library: str) -> None:
        assert library == f"library of {build}"
        assert not self.world.caches or FakeLibraries().has(library)
        gone = self.world.gone
        if gone is not None and str(build.config) in gone.read_text().splitlines():
            raise LibraryGoneError(f"{library}: gone")

    def _samples(self, problem: Problem, build: Build, runs: int, stage: str) -> Samples:
        kernel = self.world.kernel(build)
        if kernel.fails == stage:
            _do(kernel.how)
        draw = random.Random(f"{problem} {build} {runs} {stage}")
        ms = kernel.ms * problem.attn_flop() / 1e9
        return Samples(tuple(ms * (1 + draw.gauss(0, self.world.noise)) for _ in range(runs)))


def fake_runner(world: World, device: DeviceSpec = DEVICE) -> Runner:
    name = "fake" if device == DEVICE else device.name
    origin = {"gpu": name, "arch": device.arch}
    return Runner(FakeCompiler(world), FakeBench(world), device, {"gpu": name}, origin)


def machine_runner(world: World, halving: object = None) -> Runner:
    """The runner of a machine whose GPUs are what its environment says."""
    runner = fake_runner(world, device_spec(os.environ.get("FAKE_GPU", DEVICE.name)))
    return replace(runner, libraries=FakeLibraries() if world.caches else None)


# d 128, fp16, the first of each of the set's shapes: their short forms are what fakes go by.
CONFIGS = get_autotuning_kernel_configs([DType.FP16])
NAMES = [str(cfg) for cfg in CONFIGS]
PROBLEM = Problem(2, 512, 512, 4, 4, 128, DType.FP16)


def times(best: int, count: int, step: float = 0.05) -> dict[str, Kernel]:
    """`count` kernels, each a step slower than the one before; number `best` is the fastest."""
    order = sorted(range(count), key=lambda n: (n != best, n))
    return {NAMES[n]: Kernel(ms=1 + step * place) for place, n in enumerate(order)}


def but(kernels: dict[str, Kernel], changes: dict[int, dict[str, object]]) -> dict[str, Kernel]:
    """The kernels, some of them changed by number."""
    changed = {NAMES[n]: replace(kernels[NAMES[n]], **change) for n, change in changes.items()}  # type: ignore[arg-type]
    return {**kernels, **changed}
