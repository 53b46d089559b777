"""PreparedCall: a request with its outputs and its kernel, planned and ready to be launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flashsmith.families import DeviceSpec, KernelConfig, Problem, Semantics
from flashsmith.families.canonical import version_of
from flashsmith.operations import Call
from flashsmith.operations.operation import shape_of
from flashsmith.runtime.frameworks.base import TensorView, contiguous_strides
from flashsmith.runtime.libraries import LoadedKernel, PreparedLaunch
from flashsmith.runtime.request import Request

if TYPE_CHECKING:
    from flashsmith.runtime.emulation import EmulationResult, Observer


class OperationCall(NamedTuple):
    """One checked call to any operation, in the form that a kernel library takes.

    ``numbers`` and ``addresses`` are in the operation's order; a tensor that is not given has
    address 0.
    """

    problem: Problem
    device: DeviceSpec
    numbers: tuple[int | float, ...]
    addresses: tuple[int, ...]

    def library_arguments(self) -> tuple[int | float, ...]:
        """Returns the arguments of the library's plan and prepare functions after the config's
        index: the device, the count of the operation's numbers, the numbers, and the tensors'
        addresses."""
        device = self.device
        return (
            *(device.arch, device.sm_count, device.max_smem_per_block, device.max_smem_per_sm),
            *(len(self.numbers), *self.numbers),
            *self.addresses,
        )


class OperationResult(NamedTuple):
    """The tensors that were written, by name, in the caller's framework, and the milliseconds if
    the call was timed on a GPU.

    ``emulation`` is None if nothing was emulated.
    """

    outputs: dict[str, Any]
    ms: float | None
    emulation: EmulationResult | None


class PreparedCall(NamedTuple):
    """A checked call to any operation on fixed tensors, which can run any number of times.

    ``kernel`` is None if there is nothing to compute; ``launch`` is None if the emulator runs the
    call. ``written`` are those of the caller's tensors that the call writes.
    """

    call: OperationCall
    views: dict[str, TensorView]
    outputs: dict[str, Any]
    kernel: LoadedKernel | None
    launch: PreparedLaunch | None
    timed: bool
    written: tuple[Any, ...] = ()

    def is_by(self, cfg: KernelConfig, semantics: Semantics) -> bool:
        """Whether the call runs on a GPU, with exactly this kernel and not a substitute."""
        kernel = self.kernel if self.launch is not None else None
        return kernel is not None and (kernel.config, kernel.semantics) == (cfg, semantics)

    def run(
        self, observers: Sequence[Observer] = (), schedule_seed: int | None = None
    ) -> OperationResult:
        """Runs the call; ``observers`` and ``schedule_seed`` are for the emulator."""
        if self.kernel is None:
            return OperationResult(self.outputs, 0.0 if self.timed else None, None)
        first = next(iter(self.views.values()))
        if self.written:
            first.framework.note_writes(self.written)
        if self.launch is not None:
            return OperationResult(self.outputs, run_on_gpu(self.launch, self.call, first), None)
        # This import is here because it loads ptxlab.
        from flashsmith.runtime.emulation import run_in_emulator

        as_numpy = first.framework.as_numpy
        arrays = {name: as_numpy(view.source) for name, view in self.views.items()}
        emulation = run_in_emulator(
            self.kernel.modules,
            self.kernel.plan(self.call),
            readable={name: it for name, it in arrays.items() if name not in self.outputs},
            writable={name: arrays[name] for name in self.outputs},
            observers=observers,
            schedule_seed=schedule_seed,
            sm_count=self.call.device.sm_count,
            # Kernels of the canonical order must produce their exact bits in the emulator, too.
            exact=version_of(self.kernel.config) > 0,
        )
        return OperationResult(self.outputs, None, emulation)


def prepare(
    request: Request,
    device: DeviceSpec,
    find_kernel: Callable[[], LoadedKernel],
    *,
    timed: bool = False,
    poisoned: bool = False,
) -> PreparedCall:
    """Allocates a request's outputs and prepares its call.

    ``find_kernel`` finds or builds the kernel. It is called after all other checks, and only if
    there is something to compute.
    """
    problem, operation = request.problem, request.problem.computed
    views, first = dict(request.views), request.first
    outputs: dict[str, Any] = {}
    written: list[Any] = []
    framework = first.framework
    for tensor in operation.outputs:
        name = tensor.name
        if name in request.wanted:
            shape = shape_of(tensor, problem, request.sizes)
            dtype = tensor.dtype_of(problem, request.options)
            other = None if dtype == first.dtype else dtype  # None is faster than a dtype
            made = framework.allocate(
                first.source, shape, other, poisoned=poisoned and "float" in dtype
            )
            outputs[name] = made
            if 0 in shape:  # an empty tensor's strides depend on the framework
                views[name] = framework.view(name, made)
            else:  # all properties of a dense output are known without a view
                views[name] = TensorView(
                    *(name, framework, dtype, shape, contiguous_strides(shape)),
                    *(framework.address(made), first.device, True, made),
                )
        elif name in views and tensor.is_written(views):
            outputs[name] = views[name].source
            written.append(outputs[name])

    strides = {name: view.strides for name, view in views.items()}
    call = OperationCall(
        problem,
        device,
        operation.numbers(Call(problem, strides, request.sizes, request.options)),
        tuple(
            views[it.name].address if it.name in views else 0
            for it in operation.tensors_of(problem.semantics)
        ),
    )
    on_gpu = first.device.kind == "cuda"
    kernel, launch = None if request.is_empty else find_kernel(), None
    if kernel is not None and on_gpu:
        launch = kernel.prepare(
            *(call, first.device.ordinal),
            timed=timed,
            framework=first.framework,
            poisoned=poisoned,
        )
    return PreparedCall(call, views, outputs, kernel, launch, timed and on_gpu, (*written,))


def unplaced_call(
    problem: Problem, device: DeviceSpec, scale: float | None = None
) -> OperationCall:
    """Makes a call for planning only, on dense tensors that have no memory yet. All addresses are
    0, except that tensors that only packed or paged problems have are at address 1.

    The softcap is 1, and a window's left limit is 0. Packed sequences all have the maximum length.
    """
    operation, sizes = problem.computed, problem.computed.sizes(problem)
    semantics = problem.semantics
    named = {
        "scale": scale,
        "softcap": float(semantics.softcap),
        "left": 0 if semantics.key_mask.takes_limits else None,
    }
    options = {name: named.get(name, default) for name, default in operation.options.items()}
    given = [tensor for tensor in operation.tensors if tensor.is_required(problem)]
    strides = {it.name: contiguous_strides(shape_of(it, problem, sizes)) for it in given}
    return OperationCall(
        problem,
        device,
        operation.numbers(Call(problem, strides, sizes, options)),
        tuple(
            int(tensor in given and tensor.presence in ("packed", "paged"))
            for tensor in operation.tensors_of(semantics)
        ),
    )


def run_on_gpu(launch: PreparedLaunch, call: OperationCall, view: TensorView) -> float | None:
    """Launches ``call``, which has been prepared, on the framework's current stream of the tensor's
    device.

    Returns the milliseconds if the launch was prepared as timed, else None. Raises LaunchError when
    the launch is refused.
    """
    framework, ordinal = view.framework, view.device.ordinal
    result = launch(framework.current_stream(ordinal), *call.addresses)
    framework.finish(ordinal)
    return result
