"""Makes views of any framework's tensors, and tests exactly whether two tensors share memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import DType
from flashsmith.runtime.frameworks import framework_of, why_refused
from flashsmith.runtime.frameworks.base import HostMemory, TensorView

# The element types of q, k, v and o.
DTYPES = {"float16": DType.FP16, "bfloat16": DType.BF16}


class Array(Protocol):
    """The type of tensors in attention() and forward(), for type checkers.

    A torch.Tensor, or a NumPy, CuPy or JAX array: anything with a shape, a dtype and DLPack.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack__(self, *args: Any, **keywords: Any) -> Any: ...


# A result has the first tensor's framework and device.
TensorT = TypeVar("TensorT", bound=Array)


class SizedDtype(Protocol):
    """A dtype of a framework, for type checkers: a torch.dtype or a numpy.dtype."""

    @property
    def itemsize(self) -> int: ...


# The arguments that dtype_name() accepts: a dtype's name, or a dtype object of flashsmith or of a
# framework.
Dtype = str | DType | SizedDtype | type[Any]


def view_tensor(name: str, tensor: Any, dtypes: Collection[str] = DTYPES) -> TensorView:
    """Returns the view of argument ``name``; copies nothing.

    Raises ArgumentError when the argument is not a tensor, has a dtype that is not in ``dtypes``,
    is neither on the host nor on a CUDA GPU, or would have to be recorded by autograd.
    """
    kind = type(tensor)
    framework = framework_of(kind)
    if framework is None:
        why = why_refused(kind) or (
            f"got {kind.__module__}.{kind.__qualname__}; "
            "give a PyTorch tensor, or a NumPy, CuPy or JAX array"
        )
        raise ArgumentError(f"{name}: {why}")
    view = framework.view(name, tensor)
    if view.dtype not in dtypes:
        *most, last = dtypes
        allowed = f"allowed are {', '.join(most)} and {last}" if most else f"must be {last}"
        raise ArgumentError(f"{name}: dtype {tensor.dtype}; {allowed}, convert it")
    return view


def view_vector(name: str, tensor: Any, dtype: str) -> TensorView:
    """Returns the view of argument ``name``, a vector of ``dtype`` ('int32' or 'float32'); copies
    nothing.

    Raises ArgumentError when the argument is not a tensor, has another dtype or rank, or is not
    contiguous.
    """
    view = view_tensor(name, tensor, (dtype,))
    if len(view.shape) != 1:
        raise ArgumentError(
            f"{name}: rank {len(view.shape)} (shape {view.shape}); must be 1: give a vector"
        )
    if view.strides[0] != 1 and view.shape[0] > 1:
        raise ArgumentError(f"{name}: stride {view.strides[0]}; must be 1 (make it contiguous)")
    check_memory(view)
    if view.address % view.element_size:
        raise ArgumentError(
            f"{name}: address {view.address:#x} is not a multiple of {view.element_size} bytes; "
            "copy it into a tensor of its own"
        )
    return view


def check_beside(view: TensorView, first: TensorView) -> None:
    """Raises ArgumentError unless a tensor has the framework and device of ``first``."""
    if view.framework is not first.framework:
        raise ArgumentError(
            f"{view.name}: is a {view.framework.name} tensor and {first.name} a "
            f"{first.framework.name} one; give all of one framework"
        )
    if view.device != first.device:
        raise ArgumentError(
            f"{view.name}: lives on {view.device} and {first.name} on {first.device}; move all to "
            "one device"
        )


def check_memory(view: TensorView) -> None:
    """Raises ArgumentError when a tensor has elements, but no memory that holds the elements."""
    if view.address == 0 and 0 not in view.shape:
        raise ArgumentError(
            f"{view.name}: has no memory (a fake tensor, or one whose storage was freed); give a "
            "real one"
        )


def byte_range(view: TensorView) -> tuple[int, int]:
    """Returns the first byte of a tensor's memory and one past the last byte."""
    first, end = _element_range(view.shape, view.strides)
    itemsize = view.element_size
    return view.address + first * itemsize, view.address + end * itemsize


@lru_cache(maxsize=1024)
def _element_range(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    first = last = 0
    for size, stride in zip(shape, strides, strict=True):
        reach = (size - 1) * stride
        first, last = first + min(reach, 0), last + max(reach, 0)
    return first, last + 1


def share_memory(a: TensorView, b: TensorView) -> bool:
    """Whether the two tensors have elements that share at least one byte. Slices that interleave
    without overlapping share no byte."""
    if a.device != b.device or 0 in a.shape or 0 in b.shape:
        return False
    a_first, a_end = byte_range(a)
    b_first, b_end = byte_range(b)
    if a_end <= b_first or b_end <= a_first:
        return False
    # NumPy decides this from addresses and strides, without reading the memory.
    return bool(np.shares_memory(_as_array(a), _as_array(b)))


def _as_array(view: TensorView) -> np.ndarray:
    size = view.element_size
    strides = tuple(stride * size for stride in view.strides)
    return np.asarray(HostMemory(view.address, view.shape, size, strides))


def check_output_distinct(o: TensorView, inputs: Sequence[TensorView]) -> None:
    """Raises ArgumentError when o shares memory with an input or with itself."""
    if 0 in o.shape:
        return
    for tensor in inputs:
        if share_memory(o, tensor):
            raise ArgumentError(
                f"{o.name}: shares memory with {tensor.name}, which the kernel still reads while "
                "the output is written; give a separate tensor, or None"
            )
    if _overlaps_itself(o.shape, o.strides):
        raise ArgumentError(
            f"{o.name}: strides {o.strides} put several elements of shape {o.shape} in one place; "
            "give a tensor that was not expanded"
        )


@lru_cache(maxsize=1024)
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether some dimension's stride is smaller than the extent of the dimensions within it.

    This also rejects unusual strides that interleave without overlapping; every slice, transpose or
    view of a dense tensor passes.
    """
    extent = 1
    for stride, size in sorted(zip(map(abs, strides), shape, strict=True)):
        if size == 1:
            continue
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False
