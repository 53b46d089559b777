"""Finds the library that contains a config's kernel. It may be loaded already, installed, or in the
cache; otherwise it is built now."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from flashsmith import bundle, env
from flashsmith.builder import (
    BuildEvent,
    KernelEntry,
    KernelLibrary,
    build,
    built_configs,
    checked_path,
    discard,
    find_library,
    find_toolchain,
    installed_package,
    losses,
    note_slow,
)
from flashsmith.errors import (
    ArgumentError,
    CacheError,
    DamagedLibraryError,
    KernelNotBuiltError,
    LaunchError,
    ToolchainError,
)
from flashsmith.families import (
    DeviceSpec,
    Family,
    KernelConfig,
    Problem,
    Semantics,
    family_named,
)
from flashsmith.paused_collection import paused_collection
from flashsmith.runtime.driver import check_runs, fill
from flashsmith.runtime.frameworks.base import Device, Framework
from flashsmith.runtime.launch_counter import note_launch
from flashsmith.runtime.launch_plan import LaunchPlan, plan_from_library
from flashsmith.semantics.cuda import semantics_numbers
from flashsmith.system_errors import is_from_system

_log = logging.getLogger("flashsmith")

NEUTRAL = Semantics()


class LibraryCall(Protocol):
    """One call for a kernel library: a problem and the addresses of its tensors."""

    @property
    def problem(self) -> Problem: ...

    @property
    def device(self) -> DeviceSpec: ...

    @property
    def addresses(self) -> tuple[int, ...]: ...

    def library_arguments(self) -> tuple[int | float, ...]: ...


# The log message for each build stage.
_REPORTED = {
    "compile": "flashsmith: compiling %s for sm_%d (first use; kept in the cache)",
    "wait": "flashsmith: waiting for another process that compiles %s for sm_%d",
}


@dataclass(frozen=True)
class LoadedKernel:
    """One kernel, ready to be planned and launched.

    ``index`` is the kernel's index in the library. Kernels of two libraries that are equal are
    interchangeable.
    """

    config: KernelConfig
    library: KernelLibrary
    index: int
    functions: LibraryFunctions
    costs: PlanCosts | None = None

    @property
    def entry(self) -> KernelEntry:
        """The compiler's report on the kernel."""
        return self.library.entry(self.config)

    @property
    def semantics(self) -> Semantics:
        """The semantics that the kernel was compiled for."""
        return self.library.manifest.semantics

    @cached_property
    def ptx(self) -> str:
        """The kernel's PTX, as compiled into the library.

        If the library comes from an installed package without PTX, the PTX is compiled now. This
        raises the builder's errors, and KernelNotBuiltError with FLASHSMITH_JIT=0.
        """
        return self._with_ptx.ptx(self.config)

    @cached_property
    def modules(self) -> dict[str, str]:
        """The PTX of all kernels that the config's plans launch, by entry."""
        beside = self._with_ptx.ptx_beside(self.config)
        return {self.entry.ptx_entry: self.ptx, **beside}

    @cached_property
    def _with_ptx(self) -> KernelLibrary:
        """The library itself if it has PTX; otherwise a library with PTX that was built from the
        same sources."""
        if self.library.has_ptx:
            return self.library
        arch = self.library.manifest.arch
        if not env.jit_enabled():
            raise KernelNotBuiltError(
                f"{self.library.path}: this package has no PTX, which the emulator runs, and "
                f"{_why_no_jit()}; install a package that was made with 'flashsmith wheel --ptx' "
                "or 'flashsmith hub --ptx', or use tensors on a GPU"
            )
        return build([self.config], arch=arch, semantics=self.semantics)

    def plan(self, call: LibraryCall) -> LaunchPlan:
        """Returns the launches of ``call``. Uses no device.

        Raises ArgumentError when the kernel cannot serve the problem or the device.
        """
        try:
            described = self.planned_by(self.functions.plan, call)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        return plan_from_library(self.entry.ptx_entries, described)

    def prepare(
        self,
        call: LibraryCall,
        ordinal: int,
        *,
        timed: bool = False,
        framework: Framework | None = None,
        poisoned: bool = False,
    ) -> PreparedLaunch:
        """Returns a function that launches ``call`` on GPU ``ordinal``; preparing it does not use
        the GPU.

        The function takes a stream handle and then ``call.addresses``, or the addresses of other
        tensors with the same properties; trailing zeros may be left out. It does not wait unless
        ``timed``; then it returns the milliseconds between two events around the launch. It raises
        LaunchError with CUDA's message when the launch is refused. Threads may share it.

        The ``framework`` allocates the plan's workspaces; without a framework they are allocated in
        stream order. With ``poisoned``, memory that the framework allocates is first filled with
        NaN, as in the emulator; workspaces that must be zero are zeroed after that.

        Raises ArgumentError when the kernel cannot serve the problem or the device, and LaunchError
        when the driver is too old for the library.
        """
        check_runs(self.library.manifest.nvcc_version)
        try:
            function, block_bytes = self.planned_by(self.functions.prepare, call, ordinal, timed)
        except ValueError as error:
            raise ArgumentError(str(error)) from None

        return PreparedLaunch(
            function,
            # A config with a single kernel has a single launch.
            len(self.plan(call).launched) if self.entry.beside else 1,
            0 if framework is None else int(block_bytes),
            self.config,
            call.problem,
            len(call.addresses),
            Device("cuda", ordinal),
            framework,
            poisoned,
        )

    def planned_by(self, function: Callable[..., Any], call: LibraryCall, *more: int) -> Any:
        """Sets the plan costs of the GPU of ``call``, and returns the result of a library's
        function for ``call``."""
        if self.costs is None:
            return function(self.index, *call.library_arguments(), *more)
        with self.costs.of(call.device.name):
            return function(self.index, *call.library_arguments(), *more)


@dataclass
class PlanCosts:
    """The cost numbers by which a library plans calls. A library has the costs of one GPU at a
    time; they stay set until a call for another GPU replaces them."""

    family: Family
    set_costs: Callable[..., bool]
    gpu: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def of(self, gpu: str) -> Iterator[None]:
        """Sets a GPU's costs for the calls that are planned inside the block. Raises LaunchError if
        the library expects a different number of costs."""
        with self.lock:
            if gpu != self.gpu:
                values = self.family.plan_costs(gpu)
                if not self.set_costs((ctypes.c_double * len(values))(*values), len(values)):
                    raise LaunchError(
                        f"plan_costs of the family {self.family.name}: gives {len(values)} "
                        "numbers, but its flashsmith_set_plan_costs() takes another count"
                    )
                self.gpu = gpu
            yield

    def forget(self) -> None:
        """Resets the state in a forked child, because a thread may have held the lock or been
        setting costs at the time of the fork."""
        self.gpu, self.lock = None, threading.Lock()


@dataclass(frozen=True)
class PreparedLaunch:
    """The result of LoadedKernel.prepare: calling it with a stream handle and addresses launches
    the kernel.

    Time-critical callers directly call ``function``, which is the library's own function. It takes
    ``n_tensors`` addresses and, if ``block_bytes`` is not 0, the address of a block of that size.
    Then they call ``note_launch`` with ``n_kernels``; if ``function`` raises RuntimeError, they
    raise ``refused``.
    """

    function: Callable[..., Any]
    n_kernels: int
    block_bytes: int
    config: KernelConfig
    problem: Problem
    n_tensors: int
    device: Device
    framework: Framework | None
    poisoned: bool

    def __call__(self, stream: int, *addresses: int) -> float | None:
        block, at = None, addresses
        if self.block_bytes:
            framework, device = self.framework, self.device
            assert framework is not None
            block = framework.workspace(self.block_bytes, device, stream)
            if self.poisoned:
                fill(block.address, 0xFF, self.block_bytes, device.ordinal, stream)
            at = (*addresses, *(0,) * (self.n_tensors - len(addresses)), block.address)
        try:
            milliseconds: float | None = self.function(stream, *at)
        except RuntimeError as error:
            raise self.refused(error) from None
        note_launch("gpu", self.n_kernels)
        return milliseconds

    def refused(self, error: RuntimeError) -> LaunchError:
        """Returns the error that a caller of ``function`` raises in place of its RuntimeError."""
        what = f"launching {self.config} for {self.problem} on GPU {self.device.ordinal}"
        return LaunchError(f"{what}: {error}")


@dataclass(frozen=True)
class LibraryFunctions:
    """The functions that a loaded library exports (csrc/host/bindings.cc)."""

    plan: Callable[..., Any]
    prepare: Callable[..., Any]
    configs: Callable[[], Any]
    semantics: Callable[[], Any]


_REPLACE_CACHED = "run 'flashsmith cache clear' and build again"
_REPLACE_INSTALLED = "install the package of kernels again"


def load_library(library: KernelLibrary) -> dict[KernelConfig, LoadedKernel]:
    """Loads a library's .so and returns its kernels.

    Raises CacheError when other users could have written the file, DamagedLibraryError when it
    cannot be loaded, and LaunchError when its kernels are not the ones in its manifest.
    """
    family = family_named(library.manifest.family)
    functions, costs = _load_functions(library.so_path, family, trusted=library.is_installed)
    config_class = family.config_class
    compiled: list[KernelConfig] = [config_class(*ints) for ints in functions.configs()]
    numbers = semantics_numbers(library.manifest.semantics)
    if set(compiled) != set(library.configs) or tuple(functions.semantics()) != numbers:
        raise LaunchError(
            f"{library.so_path}: holds other kernels than its manifest lists; "
            f"{_REPLACE_INSTALLED if library.is_installed else _REPLACE_CACHED}"
        )
    return {
        config: LoadedKernel(config, library, index, functions, costs)
        for index, config in enumerate(compiled)
    }


def _load_functions(
    so_path: Path, family: Family | None = None, *, trusted: bool = False
) -> tuple[LibraryFunctions, PlanCosts | None]:
    import tvm_ffi

    names = tuple(f.name for f in fields(LibraryFunctions))
    try:
        with nullcontext(str(so_path)) if trusted else checked_path(so_path) as path:
            # This is checked before any of the library's code runs. Once a library is loaded, the
            # linker identifies it by its path.
            content = Path(path).read_bytes()
            missing = [name for name in names if f"\0__tvm_ffi_{name}\0".encode() not in content]
            if missing:
                raise AttributeError(f"it has no function {missing[0]!r}")
            module = tvm_ffi.load_module(path)
            costs = None
            if family is not None and family.plan_costs(""):
                # The dynamic linker recognises the path and returns the library that is already
                # loaded.
                set_costs = ctypes.CDLL(path).flashsmith_set_plan_costs
                set_costs.argtypes = (ctypes.POINTER(ctypes.c_double), ctypes.c_size_t)
                set_costs.restype = ctypes.c_bool
                costs = PlanCosts(family, set_costs)
        return LibraryFunctions(*map(module.get_function, names)), costs
    except CacheError:
        raise
    except (OSError, RuntimeError, AttributeError) as error:
        if not is_from_system(error):
            raise
        raise DamagedLibraryError(
            f"{so_path}: damaged: {error}; {_REPLACE_INSTALLED if trusted else _REPLACE_CACHED}"
        ) from error


Key = tuple[KernelConfig, int, Semantics]


@dataclass
class LoadedKernels:
    """The kernels that this process has loaded, by config, arch and semantics; threads may share
    this object."""

    kernels: dict[Key, LoadedKernel] = field(default_factory=dict)
    # This lock is held during a search but not while compiling, so that threads that need other
    # kernels do not wait.
    lock: threading.RLock = field(default_factory=threading.RLock)
    building: dict[Key, threading.RLock] = field(default_factory=dict)
    # The general-edge kernels (for any lengths) that run in place of whole-tile kernels that are
    # not built.
    general_edge: dict[Key, LoadedKernel] = field(default_factory=dict)

    def get(
        self,
        cfg: KernelConfig,
        arch: int,
        semantics: Semantics = NEUTRAL,
        may_build: Callable[[], bool] = lambda: True,
    ) -> LoadedKernel:
        """Returns the kernel of a legal config: already loaded, from the cache, or built now.

        If the kernel is not built, and FLASHSMITH_JIT is 0 or ``may_build`` (called only in this
        case) returns false, the config's general-edge kernel is used instead. The general-edge
        kernel is compiled for any lengths and gives the same result within the same tolerance.

        Raises KernelNotBuiltError when neither kernel is available, and the builder's errors.
        """
        key = cfg, arch, semantics
        kernel = self.kernels.get(key)
        if kernel is not None:
            return kernel
        with self.lock:
            kernel = self._find(key, may_build)
            building = self.building.setdefault(key, threading.RLock())
        if kernel is not None:
            return kernel
        with building:
            with self.lock:
                kernel = self._find(key, may_build)  # another thread may have built it
            return kernel or self._build(key)

    def is_found(self, key: Key) -> bool:
        """Whether a kernel is loaded; loads it first if it is installed or in the cache."""
        if key in self.kernels:
            return True
        with self.lock:
            return self._is_found(key)

    def add(self, library: KernelLibrary) -> None:
        """Loads a library. Kernels that are already loaded are not replaced. Kernels for which the
        compiler generated slow code are recorded, so that choosers avoid them."""
        arch, semantics = library.manifest.arch, library.manifest.semantics
        with self.lock:
            for config, kernel in load_library(library).items():
                self.kernels.setdefault((config, arch, semantics), kernel)
        note_slow(library)

    def forget_waiting(self) -> None:
        """Resets the locks in a forked child, since threads that may hold them do not exist
        there."""
        self.lock = threading.RLock()
        self.building = {}
        for kernel in self.kernels.values():
            if kernel.costs is not None:
                kernel.costs.forget()

    def _find(self, key: Key, may_build: Callable[[], bool]) -> LoadedKernel | None:
        """Returns the kernel, or the general-edge kernel if building is not allowed; None if it
        must be built."""
        if key in self.general_edge and _why_not_build(may_build, key):
            return self.general_edge[key]  # found by an earlier call, so there is no second search
        if self._is_found(key):
            return self.kernels[key]
        forbidden = _why_not_build(may_build, key)
        return self._general_edge(key, forbidden) if forbidden else None

    def _build(self, key: Key) -> LoadedKernel:
        cfg, arch, semantics = key
        reported: set[str] = set()

        def say(event: BuildEvent) -> None:
            # This is a warning, because the caller waits seconds for a call that usually takes
            # microseconds. If several processes, such as the ranks of a group, need the kernel at
            # the same time, only one builds it.
            if event.stage in _REPORTED and event.stage not in reported:
                reported.add(event.stage)
                _log.warning(_REPORTED[event.stage], _named(cfg, semantics), arch)

        library = build([cfg], arch=arch, semantics=semantics, progress=say)
        if cfg.family.must_not_spill and (found := losses(library.entry(cfg))):
            _log.warning(
                "flashsmith: nvcc %s made %s slower than it could be, but still correct: %s",
                *(library.manifest.nvcc_version, _named(cfg, semantics), "; ".join(found)),
            )
        self.add(library)
        return self.kernels[key]

    @paused_collection()
    def _is_found(self, key: Key) -> bool:
        """Does the same as is_found(), for callers that already hold the lock."""
        cfg, arch, semantics = key
        if key not in self.kernels:
            library = find_library(cfg, arch=arch, semantics=semantics)
            if library is None:
                return False
            try:
                self.add(library)
            except DamagedLibraryError as error:
                _log.warning("flashsmith: %s", error)
                discard(library)
                return False
        return True

    def _general_edge(self, key: Key, forbidden: str) -> LoadedKernel:
        cfg, arch, semantics = key
        if key not in self.general_edge:
            uneven = cfg, arch, replace(semantics, uneven=True)
            if semantics.uneven or not self._is_found(uneven):
                raise _not_built(cfg, arch, semantics, forbidden)
            _log.warning(
                "flashsmith: %s is not built for sm_%d, and %s; its kernel for uneven lengths "
                "computes the same within the same tolerance and serves instead",
                *(_named(cfg, semantics), arch, forbidden),
            )
            self.general_edge[key] = self.kernels[uneven]
        return self.general_edge[key]


loaded_kernels = LoadedKernels()
os.register_at_fork(after_in_child=loaded_kernels.forget_waiting)


def _why_not_build(may_build: Callable[[], bool], key: Key) -> str | None:
    if not env.jit_enabled():
        return _why_no_jit()
    if not may_build():
        return "no compiler is started while a CUDA graph is captured"
    # Without installed kernels, the builder's own error says how to install a compiler.
    if installed_package(key[1]) is not None and (missing := _missing_compiler()):
        return f"no compiler is installed ({missing})"
    return None


def _why_no_jit() -> str:
    if bundle.is_copy():
        return "kernels of the hub are never compiled where they are used"
    return "FLASHSMITH_JIT=0 forbids building it now"


@lru_cache(maxsize=1)
def _missing_compiler() -> str:
    """Returns a string that names the missing build tools; '' if none is missing."""
    try:
        find_toolchain()
    except ToolchainError as error:
        return str(error).partition(";")[0]
    return ""


def _named(cfg: KernelConfig, semantics: Semantics) -> str:
    return str(cfg) if semantics == NEUTRAL else f"{cfg} [{semantics}]"


def _not_built(cfg: KernelConfig, arch: int, semantics: Semantics, why: str) -> KernelNotBuiltError:
    nearest = nearest_built(cfg, arch, semantics)
    listed = "".join(f"\n  {config}" for config in nearest) or " none"
    advice = (
        f'Build it with: flashsmith build --kernels "{cfg}" --arch {arch}'
        + ("" if semantics == NEUTRAL else f" --semantics {semantics}")
        if not bundle.is_copy()
        else f"Load a folder that 'flashsmith hub --for sm_{arch}' wrote with more kernels, or "
        "install flashsmith with a compiler"
    )
    return KernelNotBuiltError(
        f"config {_named(cfg, semantics)} is not built for sm_{arch}, and {why}.\n"
        f"Nearest built:{listed}\n{advice}"
    )


def nearest_built(
    cfg: KernelConfig, arch: int, semantics: Semantics = NEUTRAL
) -> list[KernelConfig]:
    """Returns up to three configs that are built for ``arch``, those that differ from the given
    config in the fewest knobs first."""

    def differences(other: KernelConfig) -> int:
        return sum(a != b for a, b in zip(cfg.to_ints(), other.to_ints(), strict=True))

    built = built_configs(arch=arch, semantics=semantics)
    same_family = (other for other in built if other.FAMILY == cfg.FAMILY)
    return sorted(same_family, key=lambda other: (differences(other), other.to_ints()))[:3]
