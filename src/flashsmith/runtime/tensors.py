"""One look at a tensor, whoever made it: PyTorch, NumPy, CuPy, JAX or flashsmith itself.

No framework is imported here unless the caller already holds one of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import DType
from flashsmith.runtime.device_array import DeviceArray


class Device(NamedTuple):
    """Where a tensor lives: kind 'cpu' or 'cuda', and the GPU's ordinal (0 on the host)."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.ordinal}"


HOST = Device("cpu", 0)

# A NamedTuple's own constructor takes twice as long, and every launch needs eight of them.
_new_tuple = tuple.__new__


class RawView(NamedTuple):
    """What a framework says of a tensor, its dtype still its own. Strides count elements."""

    framework: str  # "torch", "numpy", "cupy", "jax" or "flashsmith"
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: Device
    writable: bool


class TensorView(NamedTuple):
    """What flashsmith needs to know of a 16-bit tensor. Strides count elements."""

    name: str
    framework: str
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
    framework: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: Device
    source: Any

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return 4


# Dtypes of every framework met so far; a framework's own are added with its first tensor.
_DTYPES: dict[Any, DType] = {
    np.dtype(np.float16): DType.FP16,
    np.dtype(ml_dtypes.bfloat16): DType.BF16,
}
_NAMES: dict[Any, str] = {np.dtype(np.int32): "int32", np.dtype(np.float32): "float32"}


def view_tensor(name: str, tensor: Any) -> TensorView:
    """Looks at argument ``name``; copies nothing.

    Raises ArgumentError when it is no tensor, its dtype is neither fp16 nor bf16, it lives neither
    on the host nor on a CUDA GPU, or autograd would have to follow it.
    """
    framework, dtype, shape, strides, address, device, writable = _raw_view(name, tensor)
    known = _DTYPES.get(dtype)
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
    if _NAMES.get(raw.dtype) != dtype:
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


def check_beside(view: TensorView | VectorView, q: TensorView) -> None:
    """Raises ArgumentError unless a tensor is of q's framework and lives on q's device."""
    if view.framework != q.framework:
        raise ArgumentError(
            f"{view.name}: is a {view.framework} tensor and q a {q.framework} one; "
            "give all of one framework"
        )
    if view.device != q.device:
        raise ArgumentError(
            f"{view.name}: lives on {view.device} and q on {q.device}; move all to one device"
        )


def check_memory(view: TensorView | VectorView) -> None:
    """Raises ArgumentError when a tensor has elements, but no memory for them."""
    if view.address == 0 and 0 not in view.shape:
        raise ArgumentError(
            f"{view.name}: has no memory (a fake tensor, or one whose storage was freed); give a "
            "real one"
        )


Viewer = Callable[[str, Any], RawView]
# How to look at objects of a type; decided once per type, since every call asks.
_viewers: dict[type, Viewer] = {}


def _raw_view(name: str, tensor: Any) -> RawView:
    kind = type(tensor)
    viewer = _viewers.get(kind)
    if viewer is None:
        viewer = _viewers[kind] = _find_viewer(kind)
    return viewer(name, tensor)


def _find_viewer(kind: type) -> Viewer:
    if issubclass(kind, np.ndarray):
        return _view_numpy
    if issubclass(kind, DeviceArray):
        return _view_device_array
    if _is_torch_tensor(kind):
        return _torch_viewer()
    # Late, because it builds on RawView.
    from flashsmith.runtime.frameworks import FRAMEWORKS

    for framework in FRAMEWORKS.values():
        if framework.owns(kind):
            return framework.view
    return _refuse


def _refuse(name: str, value: object) -> RawView:
    kind = type(value)
    if kind.__module__.partition(".")[0] == "jax" and "Tracer" in str(kind.__mro__):
        raise ArgumentError(
            f"{name}: is a tracer of a JAX transformation ({kind.__qualname__}), which has no "
            "values; flashsmith's calls cannot be traced: make them outside of jax.jit, jax.grad "
            "and jax.vmap, on arrays"
        )
    raise ArgumentError(
        f"{name}: got {type(value).__module__}.{type(value).__qualname__}; "
        "give a PyTorch tensor, or a NumPy, CuPy or JAX array"
    )


def _is_torch_tensor(kind: type) -> bool:
    """Whether a type is torch.Tensor or derived from it, found without importing torch."""
    return any(
        base.__name__ == "Tensor" and base.__module__.partition(".")[0] == "torch"
        for base in kind.__mro__
    )


def _view_numpy(name: str, array: np.ndarray) -> RawView:
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            f"{name}: is a masked array, whose mask no kernel would see; give its .filled()"
        )
    strides = in_elements(name, "numpy", array.strides, max(array.itemsize, 1))
    address, read_only = array.__array_interface__["data"]
    return RawView("numpy", array.dtype, array.shape, strides, address, HOST, not read_only)


def in_elements(
    name: str, framework: str, strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Strides in bytes as strides in elements. Raises ArgumentError unless they are whole ones."""
    if any(stride % itemsize for stride in strides):
        raise ArgumentError(
            f"{name}: strides of {strides} bytes are no whole elements of {itemsize} bytes; "
            f"copy it with {framework}.ascontiguousarray"
        )
    return tuple(stride // itemsize for stride in strides)


def _view_device_array(name: str, array: DeviceArray) -> RawView:
    device = Device("cuda", array.ordinal)
    strides = contiguous_strides(array.shape)
    return RawView("flashsmith", array.dtype, array.shape, strides, array.address, device, True)


def _torch_viewer() -> Viewer:
    import torch

    _DTYPES.update({torch.float16: DType.FP16, torch.bfloat16: DType.BF16})
    _NAMES.update({torch.int32: "int32", torch.float32: "float32"})
    strided, grad_enabled = torch.strided, torch.is_grad_enabled
    devices: dict[Any, Device] = {}

    def view(name: str, tensor: Any) -> RawView:
        if tensor.layout is not strided:
            raise ArgumentError(f"{name}: layout {tensor.layout}; give a strided (dense) tensor")
        if tensor.requires_grad and grad_enabled():
            raise ArgumentError(
                f"{name}: requires grad, and there is no backward pass here; call under "
                "torch.no_grad(), detach it, or use flashsmith.sdpa(), which leaves gradients to "
                "PyTorch"
            )
        device = devices.get(tensor.device)
        if device is None:
            device = devices[tensor.device] = _torch_device(name, tensor.device)
        shape, strides, address = tuple(tensor.shape), tensor.stride(), tensor.data_ptr()
        return _new_tuple(RawView, ("torch", tensor.dtype, shape, strides, address, device, True))

    return view


def _torch_device(name: str, device: Any) -> Device:
    kind = device.type
    if kind == "cpu":
        return HOST
    if kind == "cuda":
        return Device(kind, device.index)
    raise ArgumentError(f"{name}: lives on device {device}; allowed are cpu and cuda")


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
