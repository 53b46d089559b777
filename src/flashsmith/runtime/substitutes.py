"""Where the kernel that was chosen for a call is not built, and may not be: another that is.

For attention() without config=, which promises a result and no kernel. Whoever names a config gets
that one, or an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flashsmith import env
from flashsmith.builder import built_kernels, cache_stamp
from flashsmith.errors import ArgumentError, KernelNotBuiltError
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    Semantics,
    is_legal,
)
from flashsmith.runtime.arguments import check_fit
from flashsmith.runtime.forward_request import Request
from flashsmith.runtime.libraries import Key, LoadedKernel, LoadedKernels

_log = logging.getLogger("flashsmith")

# Calls whose substitute is remembered; all are forgotten when there are more.
MOST_CALLS = 1024

# The best of some configs for a call.
Pick = Callable[[tuple[KernelConfig, ...]], KernelConfig]
# The kernel a call wants, the problem, and whether TMA can copy its tensors.
_Call = tuple[Key, Problem, bool]


@dataclass
class Substitutes:
    """Which kernels served in place of others. A search takes milliseconds, since it reads what is
    in the cache: what it found holds until a library is published or removed there."""

    found: dict[_Call, LoadedKernel] = field(default_factory=dict)
    stamp: object = None
    said: set[tuple[Key, Key]] = field(default_factory=set)

    def kernel_or_other(
        self,
        loaded: LoadedKernels,
        wanted: Key,
        request: Request,
        device: DeviceSpec,
        pick: Pick,
        may_build: Callable[[], bool],
    ) -> LoadedKernel:
        """The kernel ``wanted``, built if it has to be and may be, else another one that is built.

        ``pick`` chooses among those of all families that serve the request. Another one is warned
        of once for each pair of kernels.

        Raises KernelNotBuiltError when none serves it, and what the builder raises.
        """
        # Most processes never need a substitute, and then nothing is worked out for one.
        if self.found and not (env.jit_enabled() and may_build()):
            known = self.found.get(_call(wanted, request))
            if known is not None and self.stamp == cache_stamp():
                return known
        try:
            return loaded.get(*wanted, may_build)
        except KernelNotBuiltError as error:
            stamp = cache_stamp()
            other = _best_built(loaded, request, device, pick)
            if other is None:
                raise
            self._remember(_call(wanted, request), other, stamp)
            self._say(wanted, other, str(error).partition(".\n")[0])
            return other

    def _remember(self, call: _Call, other: LoadedKernel, stamp: object) -> None:
        if self.stamp != stamp or len(self.found) >= MOST_CALLS:
            # Replaced, not emptied: another thread may be looking.
            self.found, self.stamp = {}, stamp
        self.found[call] = other

    def _say(self, wanted: Key, other: LoadedKernel, why: str) -> None:
        pair = wanted, (other.config, wanted[1], other.semantics)
        if pair not in self.said:
            self.said.add(pair)
            _log.warning(
                "flashsmith: %s; %s [%s] is built and serves instead: it may be slower, and bits "
                "may differ",
                *(why, other.config, other.semantics),
            )


substitutes = Substitutes()


def _call(wanted: Key, request: Request) -> _Call:
    return wanted, request.problem, request.suits_tma


def _best_built(
    loaded: LoadedKernels, request: Request, device: DeviceSpec, pick: Pick
) -> LoadedKernel | None:
    serving = _serving(request, device)
    while serving:
        config = pick(tuple(serving))
        try:
            return loaded.get(config, device.arch, serving.pop(config), lambda: False)
        except KernelNotBuiltError:
            continue  # damaged, or removed meanwhile
    return None


def _serving(request: Request, device: DeviceSpec) -> dict[KernelConfig, Semantics]:
    """The built configs that serve a request, and for what their kernels were compiled: the very
    semantics if there is such a kernel, else those for uneven lengths, too."""
    serving: dict[KernelConfig, Semantics] = {}
    for config, semantics in built_kernels(arch=device.arch):
        if config.family.needs_tma and not request.suits_tma:
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
