"""Whether two strided tensors share memory: decided exactly, not by their outer bounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.runtime.frameworks.base import HostMemory, TensorView


def byte_range(view: TensorView) -> tuple[int, int]:
    """First byte and one past the last byte that the tensor can touch."""
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
    """Whether some byte belongs to an element of both (interleaved slices do not share)."""
    if a.device != b.device or 0 in a.shape or 0 in b.shape:
        return False
    a_first, a_end = byte_range(a)
    b_first, b_end = byte_range(b)
    if a_end <= b_first or b_end <= a_first:
        return False
    # NumPy decides without touching the memory.
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
                "the output is written; give memory of its own, or none"
            )
    if _overlaps_itself(o.shape, o.strides):
        raise ArgumentError(
            f"{o.name}: strides {o.strides} put several elements of shape {o.shape} in one place; "
            "give a tensor that was not expanded"
        )


@lru_cache(maxsize=1024)
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether some dimension's step is smaller than what lies within it.

    Strict for odd stride sets that happen to interleave; every slice, transpose or view of a
    dense tensor passes.
    """
    extent = 1
    for stride, size in sorted(zip(map(abs, strides), shape, strict=True)):
        if size == 1:
            continue
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False
