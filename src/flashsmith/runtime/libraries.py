"""Finds the library that holds a config: what is loaded, then the cache, then the compiler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flashsmith import env
from flashsmith.builder import KernelEntry, KernelLibrary, build, built_configs, find_library
from flashsmith.configs import FlashForwardKernelConfig, Semantics
from flashsmith.configs.semantics import MASKS
from flashsmith.errors import ArgumentError, KernelNotBuiltError, LaunchError
from flashsmith.runtime.call import ForwardCall
from flashsmith.runtime.launches import note_launch
from flashsmith.runtime.plan import LaunchPlan, plan_from_library

_log = logging.getLogger("flashsmith")

NEUTRAL = Semantics()


@dataclass(frozen=True)
class LoadedKernel:
    """One kernel, ready to be planned and launched.

    ``index`` is its place in the library's map. Equal kernels of two libraries are interchangeable.
    """

    config: FlashForwardKernelConfig
    library: KernelLibrary
    index: int
    functions: LibraryFunctions

    @property
    def entry(self) -> KernelEntry:
        """The compiler's report on the kernel."""
        return self.library.entry(self.config)

    @cached_property
    def ptx(self) -> str:
        """The kernel's PTX, as compiled into the library."""
        return self.library.ptx(self.config)

    def plan(self, call: ForwardCall) -> LaunchPlan:
        """The launch that ``call`` becomes. Asks no device.

        Raises ArgumentError when the kernel cannot serve the problem or the device.
        """
        try:
            described = self.functions.plan(self.index, *call.library_arguments())
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        if int(described[0]) != self.index:
            raise LaunchError(
                f"{self.library.so_path}: planned kernel {described[0]} where {self.index} "
                f"({self.config}) was asked for; 'flashsmith cache clear' and build again"
            )
        return plan_from_library(self.entry.ptx_entry, described)

    def launch(self, call: ForwardCall, ordinal: int, stream: int) -> None:
        """Launches on GPU ``ordinal`` and the stream with handle ``stream``; does not wait.

        Raises LaunchError with CUDA's words when the launch is refused.
        """
        _launching(self, self.functions.launch, call, ordinal, stream)

    def launch_timed(self, call: ForwardCall, ordinal: int, stream: int) -> float:
        """The same between two events, waiting for the second; milliseconds."""
        return float(_launching(self, self.functions.launch_timed, call, ordinal, stream))


def _launching(
    kernel: LoadedKernel, function: Callable[..., Any], call: ForwardCall, ordinal: int, stream: int
) -> Any:
    try:
        result = function(kernel.index, *call.library_arguments(), ordinal, stream)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    except RuntimeError as error:
        raise LaunchError(
            f"launching {kernel.config} for {call.problem} on GPU {ordinal}: {error}"
        ) from None
    note_launch("gpu")
    return result


@dataclass(frozen=True)
class LibraryFunctions:
    """The functions a loaded library exports (csrc/bindings.cc)."""

    plan: Callable[..., Any]
    launch: Callable[..., Any]
    launch_timed: Callable[..., Any]
    configs: Callable[[], Any]
    semantics: Callable[[], Any]
    query_device: Callable[[int], Any]
    device_count: Callable[[], int]


def load_library(library: KernelLibrary) -> dict[FlashForwardKernelConfig, LoadedKernel]:
    """Loads a library's .so and returns its kernels.

    Raises LaunchError when what is compiled into it is not what its manifest says.
    """
    import tvm_ffi

    module = tvm_ffi.load_module(str(library.so_path))
    functions = LibraryFunctions(
        *(module.get_function(name) for name in LibraryFunctions.__dataclass_fields__)
    )
    compiled = [_config(*ints) for ints in functions.configs()]
    semantics = _semantics(*functions.semantics())
    if set(compiled) != set(library.configs) or semantics != library.manifest.semantics:
        raise LaunchError(
            f"{library.so_path}: holds other kernels than its manifest lists; "
            "'flashsmith cache clear' and build again"
        )
    return {
        config: LoadedKernel(config, library, index, functions)
        for index, config in enumerate(compiled)
    }


def _config(*fields: Any) -> FlashForwardKernelConfig:
    return FlashForwardKernelConfig(*fields)


def _semantics(mask: int, *flags: int) -> Semantics:
    return Semantics(MASKS[mask], *map(bool, flags))


Key = tuple[FlashForwardKernelConfig, int, Semantics]


@dataclass
class LoadedKernels:
    """The kernels this process has loaded, by config, arch and semantics; safe to share."""

    kernels: dict[Key, LoadedKernel] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def get(
        self,
        cfg: FlashForwardKernelConfig,
        arch: int,
        semantics: Semantics = NEUTRAL,
        may_build: Callable[[], bool] = lambda: True,
    ) -> LoadedKernel:
        """The kernel of a legal config: loaded already, from the cache, or built now.

        Raises KernelNotBuiltError when it would have to be built and FLASHSMITH_JIT is 0 or
        ``may_build`` (asked only then) is false, and what the builder raises.
        """
        kernel = self.kernels.get((cfg, arch, semantics))
        if kernel is not None:
            return kernel
        with self.lock:
            kernel = self.kernels.get((cfg, arch, semantics))
            if kernel is None:
                self.add(_find_or_build(cfg, arch, semantics, may_build))
                kernel = self.kernels[cfg, arch, semantics]
            return kernel

    def add(self, library: KernelLibrary) -> None:
        """Loads a library; kernels that are loaded already stay as they are."""
        arch, semantics = library.manifest.arch, library.manifest.semantics
        with self.lock:
            for config, kernel in load_library(library).items():
                self.kernels.setdefault((config, arch, semantics), kernel)


loaded_kernels = LoadedKernels()


def _find_or_build(
    cfg: FlashForwardKernelConfig, arch: int, semantics: Semantics, may_build: Callable[[], bool]
) -> KernelLibrary:
    library = find_library(cfg, arch=arch, semantics=semantics)
    if library is not None:
        return library
    if not env.jit_enabled():
        raise _not_built(cfg, arch, semantics, "FLASHSMITH_JIT=0 forbids building it now")
    if not may_build():
        raise _not_built(
            cfg, arch, semantics, "no compiler is started while a CUDA graph is captured"
        )
    # A warning, since the caller waits seconds for what is usually microseconds.
    named = _named(cfg, semantics)
    _log.warning("flashsmith: compiling %s for sm_%d (first use; kept in the cache)", named, arch)
    return build([cfg], arch=arch, semantics=semantics)


def _named(cfg: FlashForwardKernelConfig, semantics: Semantics) -> str:
    return str(cfg) if semantics == NEUTRAL else f"{cfg} [{semantics}]"


def _not_built(
    cfg: FlashForwardKernelConfig, arch: int, semantics: Semantics, why: str
) -> KernelNotBuiltError:
    nearest = nearest_built(cfg, arch, semantics)
    listed = "".join(f"\n  {config}" for config in nearest) or " none"
    return KernelNotBuiltError(
        f"config {_named(cfg, semantics)} is not built for sm_{arch}, and {why}.\n"
        f"Nearest built:{listed}\n"
        f'Build it with: flashsmith build --kernels "{cfg}" --arch {arch}'
        + ("" if semantics == NEUTRAL else f" --semantics {semantics}")
    )


def nearest_built(
    cfg: FlashForwardKernelConfig, arch: int, semantics: Semantics = NEUTRAL, count: int = 3
) -> list[FlashForwardKernelConfig]:
    """Up to ``count`` configs built for ``arch``, those that differ in fewest knobs first."""

    def differences(other: FlashForwardKernelConfig) -> int:
        return sum(a != b for a, b in zip(cfg.to_ints(), other.to_ints(), strict=True))

    built = built_configs(arch=arch, semantics=semantics)
    return sorted(built, key=lambda other: (differences(other), other))[:count]
