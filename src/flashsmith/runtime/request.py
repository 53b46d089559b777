"""Request: a fully checked call to any operation, before anything is allocated or launched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.operations import Operation, TensorSpec
from flashsmith.operations.operation import shape_of, size_of
from flashsmith.printable import quoted
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.tensors import (
    check_beside,
    check_memory,
    check_output_distinct,
    view_tensor,
)

# Properties that a tensor or option may require of a problem, each with the word that adds it to a
# problem string.
_PACKED = "packed sequences", "packed"
_PAGED = "pages", "page16"
# The alignment in bytes of tensors that consist of rows; TMA, which may copy them, requires it.
_ROW_ALIGNMENT = 16


class Request(NamedTuple):
    """The checked arguments of a call.

    ``views`` and ``options`` have the operation's names as keys. ``sizes`` has, by name, the sizes
    of dimensions that the problem does not determine. ``wanted`` are the outputs to allocate.
    """

    problem: Problem
    views: Mapping[str, TensorView]
    options: Mapping[str, Any]
    sizes: Mapping[str, int]
    wanted: Collection[str]

    @property
    def first(self) -> TensorView:
        """One of the tensors; all tensors have the same framework and device."""
        return next(iter(self.views.values()))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute, because no output has an element."""
        if self.wanted and not any(0 in view.shape for view in self.views.values()):
            return False  # most calls
        p, views = self.problem, self.views
        return all(
            0 in (views[it.name].shape if it.name in views else shape_of(it, p, self.sizes))
            for it in p.computed.outputs
            if it.name in self.wanted or (it.name in views and it.is_written(views))
        )

    @property
    def suits_tma(self) -> bool:
        """Whether TMA, which some families use, can copy all tensors that consist of rows."""
        p, views = self.problem, self.views
        if p.semantics.partial and not p.semantics.packed:
            # Kernels that use TMA address the keys of the whole batch as rows of one long sequence.
            for view in (views["k"], views["v"]):
                batch, rows = view.strides[:2]
                if view.shape[0] > 1 and view.shape[1] > 1 and (rows <= 0 or batch % rows):
                    return False
        tensors = p.computed.tensors
        rows_of = [it.name for it in tensors if it.alignment == _ROW_ALIGNMENT]
        return suit_tma([views[name] for name in rows_of if name in views])

    @property
    def deterministic(self) -> bool:
        """Whether the kernel must give the same bits in every run."""
        return bool(self.options.get("deterministic"))


def suit_tma(views: Sequence[TensorView]) -> bool:
    """Whether TMA can copy all these tensors. TMA supports neither negative strides nor the zero
    strides of broadcast tensors."""
    return all(
        stride > 0
        for view in views
        for size, stride in zip(view.shape, view.strides, strict=True)
        if size > 1
    )


def check_operation(
    problem: Problem,
    tensors: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    wanted: Collection[str] = (),
    unwanted: Collection[str] = (),
) -> Request:
    """Returns the checked request for an operation's tensors (or views of them) and options, by
    name. The request does not depend on the kernel.

    ``wanted`` names optional outputs that are also written; ``unwanted`` names usual outputs that
    are not written.

    Raises ArgumentError, starting with the argument's name, when an argument is unusable.
    """
    operation = problem.computed
    _check_names(operation, "wanted", wanted, "optional")
    _check_names(operation, "unwanted", unwanted, "usual")
    asked = _check_options(operation, options)
    views, sizes = _check_tensors(operation, problem, tensors, asked)
    _check_unwanted(unwanted, views)
    new = [
        tensor.name
        for tensor in _written(operation, views)
        if tensor.name not in views
        and (tensor.name in wanted or (tensor.is_required(problem) and tensor.name not in unwanted))
    ]
    return Request(problem, views, asked, sizes, new)


def _check_tensors(
    operation: Operation,
    problem: Problem,
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[dict[str, TensorView], dict[str, int]]:
    """Returns views of the given tensors, in the operation's order, and the sizes of dimensions
    that the problem does not determine."""
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
        view = given
        if not isinstance(given, TensorView):
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
    """Returns the outputs that a call writes, given the names of the call's tensors."""
    return [tensor for tensor in operation.outputs if tensor.is_written(given)]


def _check_shape(
    tensor: TensorSpec, view: TensorView, problem: Problem, sizes: dict[str, int]
) -> None:
    """Raises ArgumentError unless the shape matches the specification. Adds the sizes that were not
    known before to ``sizes``."""
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
    """Returns why kernels cannot read a tensor with these strides, and what the user can do;
    None if kernels can read it."""
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
    """Returns why kernels cannot read a tensor at this address, and what the user can do; None
    if kernels can read it."""
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
    """Raises ArgumentError unless all names are names of outputs with this presence, optional or
    usual."""
    known = [tensor.name for tensor in operation.outputs if tensor.presence == presence]
    # ``wanted`` may also name an output that is always written.
    allowed = known if argument == "unwanted" else [it.name for it in operation.outputs]
    unknown = sorted(set(names) - set(allowed))
    if unknown:
        raise ArgumentError(
            f"{argument}={quoted(', '.join(unknown))}: {operation} has no such output; {presence} "
            f"are {', '.join(known) or 'none'}"
        )
