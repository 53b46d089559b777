"""The runner for GPUs: compiles kernels with nvcc, and checks and times them on GPU 0 of the
measuring process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

from flashsmith import env
from flashsmith.benchmark.environment import Environment, Telemetry
from flashsmith.benchmark.implementations import KernelImplementation, kernel_implementation
from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.measurement import Proof
from flashsmith.benchmark.tensor_memory import gpu_memory
from flashsmith.benchmark.timing import CudaEvents, Protocol, Samples, measure
from flashsmith.benchmark.workload import AnyWorkload, workload_of
from flashsmith.builder import KernelLibrary, build, find_library
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library_lookup import find_library_from
from flashsmith.builder.packed_library import pack_library, unpack_library
from flashsmith.builder.sources import package_sources
from flashsmith.builder.user_cache import cache_dir
from flashsmith.errors import CompileError, IllegalConfigError
from flashsmith.families import DeviceSpec, Problem
from flashsmith.runtime import query_gpu
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.tuning.race import STEADY_WARMUP_MS, Halving
from flashsmith.tuning.runner import BuildResult, LibraryGoneError, Runner
from flashsmith.tuning.trial import Build, is_right

# The number of scores per head that the first check of a kernel covers: a few hundred rows of a
# long sequence.
_QUICK_SCORES = 1 << 20
_WORKLOADS_KEPT = 16


def gpu_runner(device: DeviceSpec, ordinal: int, halving: Halving) -> Runner:
    """Returns a runner that compiles for `device` and measures on it; `device` is GPU `ordinal` of
    this process."""
    origin = asdict(Environment.collect(ordinal))
    return Runner(
        compiler=NvccCompiler(device),
        bench=GpuBench(),
        device=device,
        environment={
            "gpu": device.name,
            "driver": origin["driver"],
            "protocol": f"{halving.rungs}, {halving.final_least} x {halving.final_ms:g} ms",
        },
        origin=origin,
        process_environment=env.environment_of_gpu(ordinal),
        libraries=CachedLibraries(),
    )


def first_gpu_runner(halving: Halving) -> Runner:
    """Returns a runner for the first GPU that is visible to this process. In an actor of a cluster,
    this is the GPU of the actor.

    Raises LaunchError or ArgumentError if there is no GPU.
    """
    return gpu_runner(query_gpu(0), 0, halving)


class CachedLibraries:
    """The libraries in the user's cache."""

    def has(self, library: str) -> bool:
        """See Libraries."""
        return Cache(cache_dir()).open(library) is not None

    def pack(self, library: str) -> bytes:
        """See Libraries."""
        return pack_library(_opened(library))

    def unpack(self, library: str, packed: bytes) -> None:
        """See Libraries; raises CacheError."""
        unpack_library(Cache(cache_dir()), library, packed)


def _opened(library: str) -> KernelLibrary:
    opened = Cache(cache_dir()).open(library)
    if opened is None:
        raise LibraryGoneError(f"{library}: gone from the kernel cache, or damaged")
    return opened


class NvccCompiler:
    """Compiles batches for a device; the libraries are stored in the user's cache."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def open(self) -> None:
        """Does nothing."""

    def compile(self, builds: Sequence[Build]) -> list[BuildResult]:
        """Compiles those builds that are not in the cache. All builds must have the same semantics.

        If a batch fails, its kernels are compiled one by one.
        """
        arch, semantics = self.device.arch, builds[0].semantics
        configs = [one.config for one in builds]
        together = find_library_from(package_sources(), configs, arch=arch, semantics=semantics)
        done: dict[Build, BuildResult] = {}
        for one in builds:
            library = together or find_library(one.config, arch=arch, semantics=semantics)
            if library is not None:
                done[one] = self._compiled(one, library)
        missing = [one for one in builds if one not in done]
        if not missing:
            return [done[one] for one in builds]
        try:
            # Warnings about spills are suppressed, since the sweep applies its own limit to spills.
            library = build(
                [one.config for one in missing],
                arch=arch,
                semantics=semantics,
                jobs=1,
                progress=lambda event: None,
            )
            done |= {one: self._compiled(one, library) for one in missing}
        except (CompileError, IllegalConfigError) as error:
            if len(missing) == 1:
                done[missing[0]] = BuildResult(error=str(error))
            else:
                done |= {one: self.compile([one])[0] for one in missing}
        return [done[one] for one in builds]

    def _compiled(self, one: Build, library: KernelLibrary) -> BuildResult:
        facts = KernelFacts.of(library.entry(one.config), self.device)
        return BuildResult(facts, library.manifest.key)


class GpuBench:
    """Checks and times kernels on GPU 0 of this process.

    It keeps the tensors of recent problems.
    """

    def open(self) -> None:
        """Initialises the GPU, with PyTorch if it is installed; this can take a while.

        Raises LaunchError if there is no GPU.
        """
        self._memory = gpu_memory()
        self._workloads: OrderedDict[Problem, AnyWorkload] = OrderedDict()
        self._open_libraries: dict[str, KernelLibrary] = {}
        self._clock = CudaEvents()
        self._telemetry = Telemetry()

    def prepare(self, problem: Problem) -> None:
        """Makes the tensors of a problem."""
        self._workload(problem)

    def prove(self, problem: Problem, build: Build, library: str, thorough: bool) -> Proof:
        """Checks two heads of the output by flashsmith.verify's tolerance rule: all rows if
        `thorough`, otherwise some rows.

        If an output is wrong, it is checked again with new tensors, since an earlier kernel may
        have written out of bounds.
        """
        proof = self._proof(problem, build, library, thorough)
        if not is_right(proof):
            self._workloads.clear()
            proof = self._proof(problem, build, library, thorough)
        return proof

    def time(
        self,
        problem: Problem,
        kernels: Sequence[tuple[Build, str]],
        least: int,
        ms: float,
        steady: bool,
    ) -> list[Samples]:
        """Times kernels with measure(), which flushes the L2 before each launch."""
        protocol = Protocol(
            num_warmups=1 if steady else 0,
            runs=least,
            warmup_ms=STEADY_WARMUP_MS if steady else 0.0,
            measure_ms=ms,
            num_estimates=1,
        )
        implementations = [self._implementation(problem, *kernel) for kernel in kernels]
        found = measure(implementations, protocol, clock=self._clock, telemetry=self._telemetry)
        return [found[implementation.name] for implementation in implementations]

    def _proof(self, problem: Problem, build: Build, library: str, thorough: bool) -> Proof:
        implementation = self._implementation(problem, build, library)
        scores = None if thorough else _QUICK_SCORES
        return Proof.of(implementation.workload.check(implementation.output(), scores))

    def _implementation(self, problem: Problem, build: Build, library: str) -> KernelImplementation:
        if library not in self._open_libraries:
            self._open_libraries[library] = opened = _opened(library)
            loaded_kernels.add(opened)
        return kernel_implementation(build.config, self._workload(problem))

    def _workload(self, problem: Problem) -> AnyWorkload:
        found = self._workloads.pop(problem, None)
        if found is None:
            while len(self._workloads) >= _WORKLOADS_KEPT:
                self._workloads.popitem(last=False)
            found = self._make(problem)
        self._workloads[problem] = found
        return found

    def _make(self, problem: Problem) -> AnyWorkload:
        try:
            return workload_of(problem, memory=self._memory)
        except Exception:
            # Any exception is caught, because PyTorch and the driver raise different errors when
            # memory runs out.
            if not self._workloads:
                raise
            self._workloads.clear()
            return workload_of(problem, memory=self._memory)
