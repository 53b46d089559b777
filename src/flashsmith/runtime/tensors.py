"""One look at a tensor, whoever made it: where it is, its shape and strides, its dtype."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from flashsmith.errors import ArgumentError
from flashsmith.families import DType
from flashsmith.runtime.frameworks import framework_of, why_refused
from flashsmith.runtime.frameworks.base import NUMPY_DTYPES, Device, Framework, RawView

# A NamedTuple's own constructor takes twice as long, and every launch needs several of them.
_new_tuple = tuple.__new__

_DTYPES: dict[str | None, DType] = {"float16": DType.FP16, "bfloat16": DType.BF16}


class Array(Protocol):
    """What attention() and forward() take for a tensor, as type checkers see it.

    A torch.Tensor, or a NumPy, CuPy or JAX array: whatever has a shape, a dtype and DLPack.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack__(self, *args: Any, **keywords: Any) -> Any: ...


class TensorView(NamedTuple):
    """What flashsmith needs to know of a 16-bit tensor. Strides count elements."""

    name: str
    framework: Framework
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: Device
    writable: bool
    source: Any

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.element_size


class VectorView(NamedTuple):
    """The same of a vector of 32-bit numbers: sequence offsets, sinks."""

    name: str
    framework: Framework
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: Device
    source: Any

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return 4


class OperandView(NamedTuple):
    """The same of a tensor of any element type, which ``dtype`` names as NumPy does."""

    name: str
    framework: Framework
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: Device
    writable: bool
    source: Any

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return NUMPY_DTYPES[self.dtype].itemsize


View = TensorView | VectorView | OperandView


def view_operand(name: str, tensor: Any) -> OperandView:
    """Looks at argument ``name``; copies nothing.

    Raises ArgumentError when it is no tensor, or of a dtype that no operation has.
    """
    framework, dtype, shape, strides, address, device, writable = _raw_view(name, tensor)
    known = framework.dtype_names.get(dtype)
    if known is None:
        allowed = ", ".join(framework.dtypes)
        raise ArgumentError(f"{name}: dtype {dtype}; allowed are {allowed}, convert it")
    return OperandView(name, framework, known, shape, strides, address, device, writable, tensor)


def view_tensor(name: str, tensor: Any) -> TensorView:
    """Looks at argument ``name``; copies nothing.

    Raises ArgumentError when it is no tensor, its dtype is neither fp16 nor bf16, it lives neither
    on the host nor on a CUDA GPU, or autograd would have to follow it.
    """
    framework, dtype, shape, strides, address, device, writable = _raw_view(name, tensor)
    known = _DTYPES.get(framework.dtype_names.get(dtype))
    if known is None:
        raise ArgumentError(f"{name}: dtype {dtype}; allowed are float16 and bfloat16, convert it")
    return _new_tuple(
        TensorView, (name, framework, known, shape, strides, address, device, writable, tensor)
    )


def view_vector(name: str, tensor: Any, dtype: str) -> VectorView:
    """Looks at argument ``name``, a vector of ``dtype`` ('int32' or 'float32'); copies nothing.

    Raises ArgumentError when it is no tensor, or of another dtype or rank or not contiguous.
    """
    raw = _raw_view(name, tensor)
    if raw.framework.dtype_names.get(raw.dtype) != dtype:
        raise ArgumentError(f"{name}: dtype {raw.dtype}; must be {dtype}, convert it")
    if len(raw.shape) != 1:
        raise ArgumentError(
            f"{name}: rank {len(raw.shape)} (shape {raw.shape}); must be 1: give a vector"
        )
    if raw.strides[0] != 1 and raw.shape[0] > 1:
        raise ArgumentError(f"{name}: stride {raw.strides[0]}; must be 1 (make it contiguous)")
    view = VectorView(name, raw.framework, raw.shape, raw.strides, raw.address, raw.device, tensor)
    check_memory(view)
    if view.address % view.element_size:
        raise ArgumentError(
            f"{name}: address {view.address:#x} is not a multiple of {view.element_size} bytes; "
            "copy it into a tensor of its own"
        )
    return view


def check_beside(view: View, first: View) -> None:
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


def check_memory(view: View) -> None:
    """Raises ArgumentError when a tensor has elements, but no memory for them."""
    if view.address == 0 and 0 not in view.shape:
        raise ArgumentError(
            f"{view.name}: has no memory (a fake tensor, or one whose storage was freed); give a "
            "real one"
        )


def _raw_view(name: str, tensor: Any) -> RawView:
    kind = type(tensor)
    framework = framework_of(kind)
    if framework is not None:
        return framework.view(name, tensor)
    why = why_refused(kind) or (
        f"got {kind.__module__}.{kind.__qualname__}; "
        "give a PyTorch tensor, or a NumPy, CuPy or JAX array"
    )
    raise ArgumentError(f"{name}: {why}")
