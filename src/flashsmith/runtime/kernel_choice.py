"""Finds the kernel for a request: the kernel of a named config, or the kernel of the config that a
Chooser picks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from flashsmith.builder import count_noted, installed_package
from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, KernelConfig, Problem, Semantics, device_spec, families
from flashsmith.families.canonical import emulated_arch
from flashsmith.families.head_dims import fitting_dims
from flashsmith.operations import FORWARD
from flashsmith.runtime import driver, process_forks
from flashsmith.runtime.arguments import check_device, check_fit
from flashsmith.runtime.fallback_kernels import fallback_kernels
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.libraries import LoadedKernel, loaded_kernels
from flashsmith.runtime.request import Request, suit_tma

# A built kernel counts as equally fast as the chosen one if its predicted time is longer by at most
# this share. This share is within the prediction's error, and `flashsmith build --any-length` uses
# the same share.
AS_FAST = 0.02
# The emulator's default architecture.
DEFAULT_EMULATED_ARCH = 80


# A function that chooses the config for a problem on a device; called only for new call signatures,
# and perhaps several times for one signature. The third argument names a family if only that
# family's kernels can read the tensors' layout. When no kernel may be built, ``among`` is the tuple
# of built configs. The chooser then takes the first of these whose predicted time exceeds the
# fastest one's by at most the share ``tolerance``.
Chooser = Callable[..., KernelConfig]


def choose_for(chooser: Chooser, request: Request, device: DeviceSpec) -> KernelConfig:
    """Returns the chooser's config for a request. A Chooser is not given the tensors' layouts. So
    if the Chooser picks a kernel that needs TMA, and TMA cannot copy the tensors, it chooses again
    within a family that does not use TMA."""
    cfg = chooser(request.problem, device)
    if not cfg.family.needs_tma or request.suits_tma:
        return cfg
    others = (other for other in families(cfg.family.operation) if not other.needs_tma)
    return chooser(request.problem, device, next(others).name)


@lru_cache(maxsize=1024)
def check_server(cfg: KernelConfig, problem: Problem, device: DeviceSpec) -> Semantics:
    """Returns the semantics that a config's kernel needs in order to compute a problem on a
    device."""
    semantics = check_fit(cfg, problem)
    check_device(cfg, device)
    return semantics


def arch_to_emulate(problem: Problem, operation: str = "") -> int:
    """Returns the architecture to emulate when neither an architecture nor a config is given.

    It is the first known GPU's, or a newer one if only newer GPUs have kernels for the problem's d.
    If ``operation`` is given, its families are considered instead of the families of the problem's
    operation.
    """
    fitting = (
        family.oldest_arch
        for family in families(operation or problem.operation)
        if fitting_dims(problem, family.head_dims)
    )
    return max(DEFAULT_EMULATED_ARCH, min(fitting, default=DEFAULT_EMULATED_ARCH))


def limits_of(view: TensorView, emulate: bool, arch: int | DeviceSpec) -> DeviceSpec:
    """Returns the device limits to plan for: the limits that were passed, or else the limits of the
    tensors' GPU or of the emulated architecture."""
    limits = arch if isinstance(arch, DeviceSpec) else None
    if view.device.kind == "cpu":
        return arch if isinstance(arch, DeviceSpec) else device_spec(arch)
    if emulate:
        raise ArgumentError(
            f"emulate=True: the tensors live on {view.device}; the emulator runs host tensors: "
            "copy them to the host"
        )
    process_forks.check_not_forked()
    return limits or driver.query_gpu(view.device.ordinal)


def config_and_device(
    config: KernelConfig | Chooser, request: Request, emulate: bool
) -> tuple[KernelConfig, DeviceSpec]:
    """Returns the config for a call over a cache, and the device to plan for. A Chooser picks the
    config for that device."""
    if isinstance(config, KernelConfig):
        return config, limits_of(request.first, emulate, emulated_arch(config))
    # Canonical rows have the same bits on all GPUs of a class, so calls over a cache emulate the
    # architecture that attention() would emulate.
    is_canonical = bool(request.problem.bits)
    arch = arch_to_emulate(request.problem, FORWARD.name) if is_canonical else DEFAULT_EMULATED_ARCH
    device = limits_of(request.first, emulate, arch)
    return config(request.problem, device), device


def kernel_for(
    cfg: KernelConfig,
    semantics: Semantics,
    request: Request,
    device: DeviceSpec,
    chooser: Chooser | None,
) -> LoadedKernel:
    """Returns the kernel to run for a request; during CUDA graph capture no kernel is built.

    If the chosen kernel is not built, or the compiler made it slow, the ``chooser`` may pick
    another. This happens before the first launch, so that all calls of this kind use the same
    kernel.
    """
    first = request.first
    wanted = cfg, device.arch, semantics

    def may_build() -> bool:
        return first.device.kind == "cpu" or not first.framework.is_capturing(first.device.ordinal)

    def choose_among(configs: tuple[KernelConfig, ...]) -> KernelConfig:
        assert chooser is not None
        return chooser(request.problem, device, among=configs)

    if chooser is None:
        return loaded_kernels.get(*wanted, may_build)

    def is_as_fast(other: KernelConfig) -> bool:
        assert chooser is not None
        pair = other, cfg
        return chooser(request.problem, device, among=pair, tolerance=AS_FAST) == other

    noted = count_noted()
    kernel = fallback_kernels.kernel_or_other(
        loaded_kernels, wanted, request, device, choose_among, may_build, is_as_fast
    )
    if noted != count_noted():
        other = choose_for(chooser, request, device)
        if other != cfg:
            needed = check_server(other, request.problem, device)
            return kernel_for(other, needed, request, device, chooser)
    return kernel


def as_installed(cfg: KernelConfig, semantics: Semantics, device: DeviceSpec) -> Semantics:
    """Returns the semantics of the kernel of a config that a call over a cache runs: those for any
    lengths if an installed package left out the kernel for whole tiles, otherwise ``semantics``."""
    if semantics.uneven or installed_package(device.arch) is None:
        return semantics
    uneven = replace(semantics, uneven=True)
    whole = loaded_kernels.is_found((cfg, device.arch, semantics))
    return semantics if whole or not loaded_kernels.is_found((cfg, device.arch, uneven)) else uneven


def check_tma(cfg: KernelConfig, views: Sequence[TensorView]) -> None:
    """Raises ArgumentError if the config's kernel uses TMA and TMA cannot copy one of the views."""
    if not cfg.family.needs_tma or any(0 in view.shape for view in views):
        return
    for view in views:
        if not suit_tma([view]):
            others = (it.config_class for it in families(cfg.family.operation) if not it.needs_tma)
            raise ArgumentError(
                f"{view.name}: strides {view.strides} of shape {view.shape}; {cfg} copies by TMA, "
                "which takes positive strides only: make it contiguous, or use a "
                f"{' or a '.join(it.__name__ for it in others)}"
            )
