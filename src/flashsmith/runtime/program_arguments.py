"""Checks the tensors and numbers that a program's functions read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.operations.operation import READS
from flashsmith.printable import quoted
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.tensors import check_beside, check_memory, view_tensor

_LONGEST = 2**31 - 1


class ProgramArguments(NamedTuple):
    """A program's tensors by the operation's names, the sizes of their dimensions, and its
    numbers."""

    views: dict[str, TensorView]
    sizes: dict[str, int]
    numbers: tuple[int | float, ...]


def check_program_arguments(bound: Any, first: TensorView) -> ProgramArguments:
    """Returns the checked tensors and numbers of a BoundProgram, for a call on the tensor
    ``first``.

    Raises ArgumentError for an empty tensor, and for a tensor whose dtype, rank, framework or
    device is not the one that the program was made for. The error calls the tensor by the name that
    the function has for it.
    """
    program = bound.program
    _check_counts(program.reads, bound.tensors, "tensors")
    _check_counts(program.numbers, bound.numbers, "numbers")
    names = [name or it.name for name, it in zip(_names(bound), program.reads, strict=True)]
    views: dict[str, TensorView] = {}
    sizes: dict[str, int] = {}
    given = zip(READS, names, program.reads, bound.tensors, strict=False)
    for spec, name, read, tensor in given:
        view = view_tensor(name, tensor, (read.dtype,))
        check_beside(view, first)
        _check_read(view, read.rank)
        _check_strides(view, [dim for it, dim in program.dims_by_key if it == read.name])
        views[spec.name] = view
        sizes |= {f"{spec.name}_{i}": size for i, size in enumerate(view.shape)}
    numbers = [
        _number(number.name, number.kind, value)
        for number, value in zip(program.numbers, bound.numbers, strict=True)
    ]
    return ProgramArguments(views, sizes, tuple(numbers))


def _names(bound: Any) -> Sequence[str]:
    """Returns the names that the caller's functions use for the tensors; '' for a tensor without a
    name."""
    return getattr(bound, "names", None) or [""] * len(bound.tensors)


def _check_read(view: TensorView, rank: int) -> None:
    check_memory(view)
    if len(view.shape) != rank:
        raise ArgumentError(
            f"{view.name}: rank {len(view.shape)} (shape {view.shape}); the function reads it "
            f"with {rank} indices: give a tensor of that rank"
        )
    if 0 in view.shape or max(view.shape, default=1) > _LONGEST:
        raise ArgumentError(
            f"{view.name}: shape {view.shape}; a function reads tensors with 1 to {_LONGEST} "
            "elements a dimension: give one that is not empty"
        )
    if view.address % view.element_size:
        raise ArgumentError(
            f"{view.name}: address {view.address:#x} is not a multiple of {view.element_size} "
            "bytes; copy it into a tensor of its own"
        )


def _check_strides(view: TensorView, dims: Sequence[int]) -> None:
    for dim in dims:
        bytes_apart = view.strides[dim] * view.element_size
        if view.shape[dim] > 1 and not 0 <= bytes_apart <= _LONGEST:
            raise ArgumentError(
                f"{view.name}: stride {view.strides[dim]} of dimension {dim}, which the key "
                f"indexes; kernels take 0 to {_LONGEST} bytes there: make it contiguous"
            )


def _check_counts(wanted: Sequence[Any], given: Sequence[Any], what: str) -> None:
    if len(wanted) != len(given):
        raise ArgumentError(
            f"program: {len(given)} {what} for a program that reads {len(wanted)}; give all of "
            "them, in the program's order"
        )


def _number(name: str, kind: str, value: Any) -> int | float:
    if kind == "float":
        return float(value)
    whole = int(value)
    if not -_LONGEST - 1 <= whole <= _LONGEST:
        raise ArgumentError(f"{name}={quoted(value)}: an int32 cannot hold it; give a smaller one")
    return whole
