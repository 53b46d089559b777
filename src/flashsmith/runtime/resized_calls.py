"""ResizableCall: a checked call that can be prepared for other sizes without repeating the checks.

Most checks of a call do not depend on the number of its rows or sequences: dtypes, strides, heads,
masks, options. A caller whose steps differ only in these numbers, such as a serving engine, runs
the other checks once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashsmith.families import DeviceSpec, KernelConfig, Problem, Semantics
from flashsmith.operations import Call
from flashsmith.runtime.cached_calls import CachedCall
from flashsmith.runtime.frameworks.base import RepeatableFramework
from flashsmith.runtime.kernel_choice import kernel_for
from flashsmith.runtime.libraries import LoadedKernel
from flashsmith.runtime.prepared_call import OperationCall, prepare
from flashsmith.runtime.request import Request


class ResizableCall:
    """A checked call on tensors of a GPU; this object keeps no tensor alive."""

    def __init__(
        self, request: Request, device: DeviceSpec, config: KernelConfig, names: Sequence[str]
    ) -> None:
        """``request`` allocates nothing, since its outputs are among its tensors. ``names`` are the
        tensors whose addresses CachedCall.run_at will take."""
        framework = request.first.framework
        assert isinstance(framework, RepeatableFramework)
        self._framework = framework
        self._like = framework.allocate(request.first.source, (0,))
        views = {name: view._replace(source=self._like) for name, view in request.views.items()}
        self._request, self._device = request._replace(views=views), device
        self.config = config
        self._strides = {name: view.strides for name, view in views.items()}
        self._kernels: dict[tuple[KernelConfig, Semantics], LoadedKernel] = {}
        problem = request.problem
        prepared = prepare(self._request, device, lambda: self._kernel(config, problem))
        self._addresses = prepared.call.addresses
        self._call = CachedCall(prepared, names, ())

    def resized(
        self, config: KernelConfig, problem: Mapping[str, int], sizes: Mapping[str, int]
    ) -> CachedCall:
        """Prepares this call for other sizes, with a config that serves those sizes.

        ``problem`` has the new sizes of the problem; ``sizes`` has the sizes of the dimensions that
        the problem does not determine. The caller guarantees that tensors have these shapes and the
        checked strides, and that outputs overlap no other tensor. Raises the errors of building a
        kernel, and ArgumentError if the kernel cannot serve the sizes.
        """
        before = self._request
        resized = _resized(before.problem, problem)
        new = Call(resized, self._strides, {**before.sizes, **sizes}, before.options)
        numbers = resized.computed.numbers(new)
        launch = self._kernel(config, resized).prepare(
            OperationCall(resized, self._device, numbers, self._addresses),
            before.first.device.ordinal,
            framework=self._framework,
        )
        return self._call.with_launch(launch, self._framework, self._like)

    def _kernel(self, config: KernelConfig, problem: Problem) -> LoadedKernel:
        wanted = config, problem.required_semantics(config)
        kernel = self._kernels.get(wanted)
        if kernel is None:
            kernel = kernel_for(*wanted, self._request, self._device, None)
            self._kernels[wanted] = kernel
        return kernel


def _resized(problem: Problem, sizes: Mapping[str, int]) -> Problem:
    """Does the same as ``dataclasses.replace``, but without the problem's checks, which take longer
    than the launch."""
    other = object.__new__(Problem)
    other.__dict__.update(problem.__dict__, **sizes)
    return other
