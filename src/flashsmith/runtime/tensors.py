"""One look at a tensor, whoever made it: where it is, its shape and strides, its dtype."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from flashsmith.errors import ArgumentError
from flashsmith.families import DType
from flashsmith.runtime.frameworks import framework_of, why_refused
from flashsmith.runtime.frameworks.base import TensorView

# What q, k, v and o may be of.
DTYPES = {"float16": DType.FP16, "bfloat16": DType.BF16}


class Array(Protocol):
    """What attention() and forward() take for a tensor, as type checkers see it.

    A torch.Tensor, or a NumPy, CuPy or JAX array: whatever has a shape, a dtype and DLPack.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack__(self, *args: Any, **keywords: Any) -> Any: ...


def view_tensor(name: str, tensor: Any, dtypes: Collection[str] = DTYPES) -> TensorView:
    """Looks at argument ``name``; copies nothing.

    Raises ArgumentError when it is no tensor, its dtype is none of ``dtypes``, it lives neither on
    the host nor on a CUDA GPU, or autograd would have to follow it.
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
    """Looks at argument ``name``, a vector of ``dtype`` ('int32' or 'float32'); copies nothing.

    Raises ArgumentError when it is no tensor, or of another dtype or rank or not contiguous.
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
    """Raises ArgumentError unless a tensor is of the first's framework and on its device."""
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
    """Raises ArgumentError when a tensor has elements, but no memory for them."""
    if view.address == 0 and 0 not in view.shape:
        raise ArgumentError(
            f"{view.name}: has no memory (a fake tensor, or one whose storage was freed); give a "
            "real one"
        )
