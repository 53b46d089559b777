"""Finds built kernels to run in place of a chosen kernel that is not built: either because nothing
may be built now, or because an installed kernel should be as fast.

Such substitutes run only for attention() without config=, which promises a result but no specific
kernel. With config= the named kernel runs, or an error is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from flashsmith import env
from flashsmith.builder import built_kernels, cache_stamp, installed_package
from flashsmith.errors import ArgumentError, KernelNotBuiltError
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    Semantics,
    is_legal,
)
from flashsmith.runtime.arguments import check_fit
from flashsmith.runtime.libraries import Key, LoadedKernel, LoadedKernels

_log = logging.getLogger("flashsmith")

# The maximum number of cached fallback kernels; all are dropped when the number is reached.
MOST_CALLS = 1024


class Asked(Protocol):
    """What a kernel must compute: a Request, or the same properties of a call that has no tensors
    yet."""

    @property
    def problem(self) -> Problem: ...

    @property
    def suits_tma(self) -> bool:
        """Whether TMA can copy the tensors."""

    @property
    def deterministic(self) -> bool: ...


# A function that picks, from the configs passed to it, the best one for a call.
Pick = Callable[[tuple[KernelConfig, ...]], KernelConfig]
# The kernel that a call wants, the call's problem, whether TMA can copy the call's tensors, and
# whether the kernel must be deterministic.
_Call = tuple[Key, Problem, bool, bool]


@dataclass
class FallbackKernels:
    """Cached fallback kernels. A search takes milliseconds, because it reads the kernel cache. The
    result is valid until a library is added to or removed from the kernel cache."""

    found: dict[_Call, LoadedKernel] = field(default_factory=dict)
    # The calls whose fallback kernel is expected to be as fast as the chosen kernel.
    as_fast: set[_Call] = field(default_factory=set)
    stamp: object = None
    warned: set[tuple[Key, Key]] = field(default_factory=set)

    def kernel_or_other(
        self,
        loaded: LoadedKernels,
        wanted: Key,
        request: Asked,
        device: DeviceSpec,
        pick: Pick,
        may_build: Callable[[], bool],
        is_as_fast: Callable[[KernelConfig], bool] = lambda other: False,
    ) -> LoadedKernel:
        """Returns the kernel ``wanted``, built now if necessary and allowed; otherwise another,
        built kernel. If an installed kernel ``is_as_fast``, nothing is built.

        ``pick`` chooses among the built configs of all families that serve the request. Each pair
        of kernels is logged once, as a warning unless the substitute is as fast.

        Raises KernelNotBuiltError when no built kernel serves the request, and the builder's
        errors.
        """
        # Most processes never use a substitute, so this test usually skips the lookup.
        if self.found:
            call = _call(wanted, request)
            stands = call in self.as_fast or not (env.jit_enabled() and may_build())
            known = self.found.get(call) if stands else None
            if known is not None and self.stamp == cache_stamp():
                return known
        if installed_package(device.arch) is not None and not loaded.is_found(wanted):
            stamp = cache_stamp()
            other = _best_built(loaded, request, device, pick)
            if other is not None and is_as_fast(other.config):
                self._remember(_call(wanted, request), other, stamp, as_fast=True)
                return other
        try:
            return loaded.get(*wanted, may_build)
        except KernelNotBuiltError as error:
            stamp = cache_stamp()
            other = _best_built(loaded, request, device, pick)
            if other is None:
                raise
            self._remember(_call(wanted, request), other, stamp, as_fast=False)
            why = str(error).partition(".\n")[0]
            same_bits = request.problem.bits != ""
            self._say(wanted, other, why, is_as_fast, same_bits=same_bits)
            return other

    def stands_for(self, wanted: Key, request: Asked) -> bool:
        """Whether an installed kernel that is as fast serves the request in place of ``wanted``, so
        that later calls need not look for another."""
        return bool(self.as_fast) and _call(wanted, request) in self.as_fast

    def _remember(self, call: _Call, other: LoadedKernel, stamp: object, *, as_fast: bool) -> None:
        if self.stamp != stamp or len(self.found) >= MOST_CALLS:
            # The dict is replaced, not emptied, because another thread may be reading the old one.
            self.found, self.as_fast, self.stamp = {}, set(), stamp
        self.found[call] = other
        if as_fast:
            self.as_fast.add(call)

    def _say(
        self,
        wanted: Key,
        other: LoadedKernel,
        why: str,
        is_as_fast: Callable[[KernelConfig], bool],
        *,
        same_bits: bool,
    ) -> None:
        pair = wanted, (other.config, wanted[1], other.semantics)
        if pair in self.warned:
            return
        self.warned.add(pair)
        as_fast = is_as_fast(other.config)
        _log.log(
            logging.INFO if as_fast else logging.WARNING,
            "flashsmith: %s; %s [%s] is built and serves instead: it %s, and bits %s",
            *(why, other.config, other.semantics),
            "should be as fast" if as_fast else "may be slower",
            "are the same" if same_bits else "may differ",
        )


fallback_kernels = FallbackKernels()


def _call(wanted: Key, request: Asked) -> _Call:
    return wanted, request.problem, request.suits_tma, request.deterministic


def _best_built(
    loaded: LoadedKernels, request: Asked, device: DeviceSpec, pick: Pick
) -> LoadedKernel | None:
    serving = _serving(request, device)
    while serving:
        config = pick(tuple(serving))
        try:
            return loaded.get(config, device.arch, serving.pop(config), lambda: False)
        except KernelNotBuiltError:
            continue  # the library is damaged or was removed in the meantime
    return None


def _serving(request: Asked, device: DeviceSpec) -> dict[KernelConfig, Semantics]:
    """Returns the built configs that can serve a request, each with the semantics of the kernel to
    use: the required semantics if such a kernel is built, otherwise the general-edge kernel's."""
    serving: dict[KernelConfig, Semantics] = {}
    for config, semantics in built_kernels(arch=device.arch):
        if config.family.needs_tma and not request.suits_tma:
            continue
        if request.deterministic and not config.family.is_deterministic(config):
            continue
        try:
            required = check_fit(config, request.problem)
        except ArgumentError:
            continue
        if not is_legal(config, device):
            continue
        if semantics == required:
            serving[config] = semantics
        elif semantics == replace(required, uneven=True):
            serving.setdefault(config, semantics)
    return serving
