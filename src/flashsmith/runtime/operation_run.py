"""Any operation by one named kernel, wherever the tensors are: run_operation(), and
prepare_operation() to run one call many times, on other tensors as a CachedOperation."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.operations import Call, Operation, TensorSpec
from flashsmith.operations.operation import shape_of, size_of
from flashsmith.printable import quoted
from flashsmith.runtime.arguments import check_config, check_device, check_serves
from flashsmith.runtime.forward_call import library_arguments
from flashsmith.runtime.forward_options import check_flag
from flashsmith.runtime.forward_pass import limits_of, run_on_gpu
from flashsmith.runtime.frameworks.base import RepeatableFramework, TensorView
from flashsmith.runtime.libraries import LoadedKernel, PreparedLaunch, loaded_kernels
from flashsmith.runtime.running_time import check_seconds, estimate_seconds
from flashsmith.runtime.tensors import (
    check_beside,
    check_memory,
    check_output_distinct,
    view_tensor,
)

if TYPE_CHECKING:
    from flashsmith.runtime.emulation import EmulationResult, Observer

# Blocks of workspaces are allocated in elements of so many bytes, int32.
BLOCK_ELEMENT = 4
# Up to so many bytes a thread's calls share one.
KEPT_BYTES = 1 << 20
# What a problem without it lacks, and the word of those that have it.
_PACKED = "packed sequences", "packed"
_PAGED = "pages", "page16"


class OperationCall(NamedTuple):
    """One checked call of any operation, in the form a kernel library takes it.

    ``numbers`` and ``addresses`` are in the operation's order; an address is 0 for what is not
    given.
    """

    problem: Problem
    device: DeviceSpec
    numbers: tuple[int | float, ...]
    addresses: tuple[int, ...]

    def library_arguments(self) -> tuple[int | float, ...]:
        """The arguments after the config's index of the library's plan and prepare."""
        return library_arguments(self.device, self.numbers, self.addresses)


class OperationResult(NamedTuple):
    """The tensors that were written, by name, in the caller's framework; ms on the GPU if timed.

    ``emulation`` is None where nothing was emulated.
    """

    outputs: dict[str, Any]
    ms: float | None
    emulation: EmulationResult | None


class PreparedOperation(NamedTuple):
    """A checked call of any operation on fixed tensors, which can be run any number of times.

    ``kernel`` is None where there is nothing to compute, ``launch`` where the emulator runs it.
    """

    call: OperationCall
    views: dict[str, TensorView]
    outputs: dict[str, Any]
    kernel: LoadedKernel | None
    launch: PreparedLaunch | None
    timed: bool

    def run(
        self, observers: Sequence[Observer] = (), schedule_seed: int | None = None
    ) -> OperationResult:
        """Runs it; ``observers`` and the schedule's seed are for the emulator."""
        if self.kernel is None:
            return OperationResult(self.outputs, 0.0 if self.timed else None, None)
        first = next(iter(self.views.values()))
        if self.launch is not None:
            return OperationResult(self.outputs, run_on_gpu(self.launch, self.call, first), None)
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
        )
        return OperationResult(self.outputs, None, emulation)


class CachedOperation:
    """Everything about a call but the addresses of its tensors, as CachedLaunch: what the cached
    calls of all operations but the default have in common. Their ``run`` checks the addresses,
    allocates the outputs and launches."""

    def __init__(self, prepared: PreparedOperation) -> None:
        """``prepared`` is the call on tensors of a RepeatableFramework, its launch among it."""
        first, launch = next(iter(prepared.views.values())), prepared.launch
        framework = first.framework
        assert isinstance(framework, RepeatableFramework)
        assert launch is not None
        self._framework = framework
        self._launch, self._function, self._n_kernels = launch, launch.function, launch.n_kernels
        self._stream_of, self._ordinal = framework.stream_of, first.device.ordinal
        self._place = framework, self._ordinal
        # On the current stream, which is the launch's.
        block = (-(-launch.block_bytes // BLOCK_ELEMENT),)
        self._new_block = framework.allocator(first.source, block, "int32") if block[0] else None
        self._new_kept = None
        if 0 < launch.block_bytes <= KEPT_BYTES:
            kept = (KEPT_BYTES // BLOCK_ELEMENT,)
            self._new_kept = framework.allocator(first.source, kept, "int32")

    def _block_on(self, stream: int) -> tuple[int, Any]:
        """The block of a call on a stream, which has one: its address, and what is to be held until
        it is launched.

        A small one of a thread's calls on the stream with handle 0 is the same for all: these run
        one after the other, and the stream is neither captured nor followed by another with its
        handle. On an H200 allocating and freeing it takes 3 µs, of the 60 of a call with gradients.
        """
        new = self._new_kept
        if stream != 0 or new is None:
            assert self._new_block is not None
            return _held(self._new_block())
        kept = _kept.blocks.get(self._place)
        if kept is None:
            kept = _kept.blocks[self._place] = _held(new())
        return kept


def _held(block: Any) -> tuple[int, Any]:
    return block.data_ptr(), block


class _Kept(threading.local):
    """Blocks that a thread's calls share, and their addresses, by framework and GPU."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[RepeatableFramework, int], tuple[int, Any]] = {}


# Another thread's launches could come between those of a plan, so each has its own.
_kept = _Kept()


def run_operation(
    cfg: KernelConfig,
    problem: Problem,
    tensors: Mapping[str, Any],
    *,
    observers: Sequence[Observer] = (),
    schedule_seed: int | None = None,
    **how: Any,
) -> OperationResult:
    """Runs ``cfg``'s kernel on ``problem`` once: ``prepare_operation``, whose keywords ``how`` are.

    ``observers`` watch the emulator, and ``schedule_seed`` decides its schedule (None: the fixed
    one).
    """
    return prepare_operation(cfg, problem, tensors, **how).run(observers, schedule_seed)


def prepare_operation(
    cfg: KernelConfig,
    problem: Problem,
    tensors: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    wanted: Collection[str] = (),
    unwanted: Collection[str] = (),
    emulate: bool = False,
    timed: bool = False,
    poisoned: bool = False,
    arch: int | DeviceSpec | None = None,
) -> PreparedOperation:
    """Everything but the launch of ``cfg``'s kernel on ``problem``: on a GPU where the tensors are
    there, for host tensors in the emulator. A kernel that is not built is built.

    Args:
        tensors: by the names of the operation's: every input, and those outputs that have memory
            already. All of one framework and device, the last dimension contiguous.
        options: of the operation, by name; those left out have its defaults.
        wanted: names of optional outputs that are to be written too.
        unwanted: names of usual outputs that are not to be written.
        emulate, timed, poisoned, arch: as of ``run_forward``.

    Raises:
        ArgumentError: an argument is unusable, its name first; nothing was launched.
        IllegalConfigError, KernelNotBuiltError, EmulationTooLongError, LaunchError: as ``forward``.
    """
    operation = problem.computed
    check_serves(check_config(cfg, problem.operation), problem)
    _check_names(operation, "wanted", wanted, "optional")
    _check_names(operation, "unwanted", unwanted, "usual")
    asked = _check_options(operation, options or {})
    if asked.get("deterministic") and not cfg.family.is_deterministic(cfg):
        raise ArgumentError(
            f"deterministic=True: {cfg} adds up in an order that timing decides; choose another "
            "config"
        )
    views, sizes = _check_tensors(operation, problem, tensors, asked)
    _check_unwanted(unwanted, views)
    first = next(iter(views.values()))
    device = limits_of(
        first, check_flag("emulate", emulate), cfg.OLDEST_ARCH if arch is None else arch
    )
    check_device(cfg, device)
    on_gpu = first.device.kind == "cuda"
    if not on_gpu and not emulate:
        check_seconds(cfg, problem, estimate_seconds(cfg, problem))

    outputs: dict[str, Any] = {}
    for tensor in _written(operation, views):
        if tensor.name in views:
            outputs[tensor.name] = views[tensor.name].source
        elif tensor.name in wanted or (tensor.is_required(problem) and tensor.name not in unwanted):
            dtype = tensor.dtype_of(problem, asked)
            made = first.framework.allocate(
                first.source,
                shape_of(tensor, problem, sizes),
                dtype,
                poisoned=poisoned and "float" in dtype,
            )
            outputs[tensor.name] = made
            views[tensor.name] = view_tensor(tensor.name, made, (dtype,))

    strides = {name: view.strides for name, view in views.items()}
    call = OperationCall(
        problem,
        device,
        operation.numbers(Call(problem, strides, sizes, asked)),
        tuple(views[t.name].address if t.name in views else 0 for t in operation.tensors),
    )
    if all(0 in views[name].shape for name in outputs):
        return PreparedOperation(call, views, outputs, None, None, timed and on_gpu)

    def may_build() -> bool:
        return not on_gpu or not first.framework.is_capturing(first.device.ordinal)

    kernel = loaded_kernels.get(cfg, device.arch, problem.required_semantics(cfg), may_build)
    launch = None
    if on_gpu:
        launch = kernel.prepare(
            *(call, first.device.ordinal),
            timed=timed,
            framework=first.framework,
            poisoned=poisoned,
        )
    return PreparedOperation(call, views, outputs, kernel, launch, timed)


def _check_tensors(
    operation: Operation,
    problem: Problem,
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[dict[str, TensorView], dict[str, int]]:
    """Views of the given tensors, in the operation's order, and the sizes of the dimensions with
    names of their own."""
    names = [tensor.name for tensor in operation.tensors]
    for name in tensors:
        if name not in names:
            hint = did_you_mean(str(name), names) or ";"
            raise ArgumentError(
                f"{name}: {operation} has no such tensor{hint} it has {', '.join(names)}"
            )
    views: dict[str, TensorView] = {}
    sizes: dict[str, int] = {}
    for tensor in operation.tensors:
        given = tensors.get(tensor.name)
        if given is None:
            if tensor.role != "out" and tensor.is_required(problem):
                raise ArgumentError(f"{tensor.name}: missing; {operation} reads it, give a tensor")
            continue
        if not tensor.is_of_kind(problem):
            what, word = _PAGED if tensor.presence == "paged" else _PACKED
            raise ArgumentError(
                f"{tensor.name}: given, and '{problem}' has no {what}; leave it out, or add the "
                f"word {word} to the problem"
            )
        view = view_tensor(tensor.name, given, (tensor.dtype_of(problem, options),))
        for other in views.values():
            check_beside(view, other)
            break
        _check_shape(tensor, view, problem, sizes)
        _check_memory(tensor, view)
        views[tensor.name] = view
    if not views:
        raise ArgumentError(f"tensors: none; {operation} takes {', '.join(names)}")
    for tensor in _written(operation, views):
        if tensor.name in views:
            _check_output(tensor, views)
    return views, sizes


def _written(operation: Operation, given: Collection[str]) -> list[TensorSpec]:
    """The outputs that a call with these tensors, by name, writes."""
    return [tensor for tensor in operation.outputs if tensor.is_written(given)]


def _check_shape(
    tensor: TensorSpec, view: TensorView, problem: Problem, sizes: dict[str, int]
) -> None:
    """Raises ArgumentError unless the shape is the specification's; notes new sizes."""
    dims = tensor.dims_of(problem)
    wanted = [size_of(dim, problem, sizes) for dim in dims]
    if len(dims) != len(view.shape) or any(
        size not in (None, real) for size, real in zip(wanted, view.shape, strict=True)
    ):
        meaning = ", ".join(map(str, dims))
        known = ", ".join("any" if size is None else str(size) for size in wanted)
        raise ArgumentError(
            f"{view.name}: shape {view.shape}; must be ({meaning}), ({known}) of '{problem}'"
        )
    for dim, size, real in zip(dims, wanted, view.shape, strict=True):
        if size is None:
            name, _, more = str(dim).partition("+")
            sizes[name] = real - int(more or 0)


def _check_memory(tensor: TensorSpec, view: TensorView) -> None:
    """Raises ArgumentError unless the last dimension is contiguous and rows are aligned."""
    check_memory(view)
    if wrong := wrong_strides(tensor, view) or wrong_address(tensor, view):
        raise ArgumentError(f"{view.name}: {wrong}")


def wrong_strides(tensor: TensorSpec, view: TensorView) -> str | None:
    """Why no kernel can read a tensor of these strides, and what to do; None where one can."""
    if 0 in view.shape:
        return None
    *steps, last = view.strides or (1,)
    if last != 1 and view.shape[-1] > 1:
        return f"stride of the last dimension is {last}; must be 1 (make it contiguous)"
    step = max(1, tensor.alignment // view.element_size)
    for axis, stride in enumerate(steps):
        if stride % step and view.shape[axis] > 1:
            return (
                f"stride {stride} of dimension {axis} is not a multiple of {step} "
                f"elements ({tensor.alignment} bytes); make it contiguous"
            )
    return None


def wrong_address(tensor: TensorSpec, view: TensorView) -> str | None:
    """The same for its address."""
    if 0 not in view.shape and view.address % max(tensor.alignment, view.element_size):
        return (
            f"address {view.address:#x} is not a multiple of {tensor.alignment} "
            "bytes; copy it into a tensor of its own"
        )
    return None


def _check_unwanted(unwanted: Collection[str], views: Mapping[str, TensorView]) -> None:
    for name in unwanted:
        if name in views:
            raise ArgumentError(f"{name}: given, and unwanted={quoted(name)}; leave one out")


def _check_output(tensor: TensorSpec, views: Mapping[str, TensorView]) -> None:
    view = views[tensor.name]
    if not view.writable:
        raise ArgumentError(f"{view.name}: is read-only; give a writable array")
    others = (
        other
        for name, other in views.items()
        if name != tensor.name and name not in tensor.may_share
    )
    check_output_distinct(view, list(others))


def _check_options(operation: Operation, options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in operation.options:
            known = ", ".join(operation.options) or "none"
            hint = did_you_mean(str(name), operation.options) or ";"
            raise ArgumentError(
                f"{name}={quoted(options[name])}: {operation} has no such option{hint} it has "
                f"{known}"
            )
    return {**operation.options, **options}


def _check_names(
    operation: Operation, argument: str, names: Collection[str], presence: str
) -> None:
    """Raises ArgumentError unless all are names of the operation's outputs of that presence."""
    known = [tensor.name for tensor in operation.outputs if tensor.presence == presence]
    # An output that is written anyway may be wanted.
    allowed = known if argument == "unwanted" else [it.name for it in operation.outputs]
    unknown = sorted(set(names) - set(allowed))
    if unknown:
        raise ArgumentError(
            f"{argument}={quoted(', '.join(unknown))}: {operation} has no such output; {presence} "
            f"are {', '.join(known) or 'none'}"
        )
