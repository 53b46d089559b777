"""One look at a tensor, whoever made it: PyTorch, NumPy or flashsmith's own GPU arrays.

PyTorch is never imported here unless the caller already holds one of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flashsmith.configs import DType
from flashsmith.errors import ArgumentError
from flashsmith.runtime.device_array import DeviceArray

_NUMPY_DTYPES = {np.dtype(np.float16): DType.FP16, np.dtype(ml_dtypes.bfloat16): DType.BF16}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Device(NamedTuple):
    """Where a tensor lives: kind 'cpu' or 'cuda', and the GPU's ordinal (0 on the host)."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.ordinal}"


HOST = Device("cpu", 0)


class TensorView(NamedTuple):
    """What flashsmith needs to know of a tensor. Strides count elements."""

    name: str
    framework: str  # "torch", "numpy" or "flashsmith"
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: Device
    writable: bool
    source: Any


def view_tensor(name: str, tensor: Any) -> TensorView:
    """Looks at argument ``name``; copies nothing.

    Raises ArgumentError when it is no tensor, its dtype is neither fp16 nor bf16, or it lives
    neither on the host nor on a CUDA GPU.
    """
    kind = type(tensor)
    viewer = _viewers.get(kind)
    if viewer is None:
        viewer = _viewers[kind] = _find_viewer(kind)
    return viewer(name, tensor)


Viewer = Callable[[str, Any], TensorView]
# How to look at objects of a type; decided once per type, since every call asks.
_viewers: dict[type, Viewer] = {}


def _find_viewer(kind: type) -> Viewer:
    if issubclass(kind, np.ndarray):
        return _view_numpy
    if issubclass(kind, DeviceArray):
        return _view_device_array
    if _is_torch_tensor(kind):
        return _torch_viewer()
    return _refuse


def _refuse(name: str, value: object) -> TensorView:
    raise ArgumentError(
        f"{name}: got {type(value).__module__}.{type(value).__qualname__}; "
        "give a PyTorch tensor or a NumPy array"
    )


def _is_torch_tensor(kind: type) -> bool:
    """Whether a type is torch.Tensor or derived from it, found without importing torch."""
    return any(
        base.__name__ == "Tensor" and base.__module__.partition(".")[0] == "torch"
        for base in kind.__mro__
    )


def _bad_dtype(name: str, dtype: object) -> ArgumentError:
    return ArgumentError(f"{name}: dtype {dtype}; allowed are float16 and bfloat16, convert it")


def _view_numpy(name: str, array: np.ndarray) -> TensorView:
    dtype = _NUMPY_DTYPES.get(array.dtype)
    if dtype is None:
        raise _bad_dtype(name, array.dtype)
    strides = _in_elements(name, array.strides, array.itemsize)
    address, read_only = array.__array_interface__["data"]
    return TensorView(
        name, "numpy", dtype, array.shape, strides, address, HOST, not read_only, array
    )


def _in_elements(name: str, strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise ArgumentError(
            f"{name}: strides of {strides} bytes are no whole elements of {itemsize} bytes; "
            "copy it with numpy.ascontiguousarray"
        )
    return tuple(stride // itemsize for stride in strides)


def _view_device_array(name: str, array: DeviceArray) -> TensorView:
    dtype = _NUMPY_DTYPES.get(array.dtype)
    if dtype is None:
        raise _bad_dtype(name, array.dtype)
    device = Device("cuda", array.ordinal)
    strides = contiguous_strides(array.shape)
    return TensorView(
        name, "flashsmith", dtype, array.shape, strides, array.address, device, True, array
    )


def _torch_viewer() -> Viewer:
    import torch

    dtypes = {torch.float16: DType.FP16, torch.bfloat16: DType.BF16}
    strided = torch.strided

    def view(name: str, tensor: Any) -> TensorView:
        dtype = dtypes.get(tensor.dtype)
        if dtype is None:
            raise _bad_dtype(name, tensor.dtype)
        if tensor.layout is not strided:
            raise ArgumentError(f"{name}: layout {tensor.layout}; give a strided (dense) tensor")
        device = _torch_device(name, tensor.device)
        shape, strides, address = tuple(tensor.shape), tensor.stride(), tensor.data_ptr()
        return TensorView(name, "torch", dtype, shape, strides, address, device, True, tensor)

    return view


def _torch_device(name: str, device: Any) -> Device:
    kind = device.type
    if kind == "cpu":
        return HOST
    if kind == "cuda":
        return Device(kind, device.index)
    raise ArgumentError(f"{name}: lives on device {device}; allowed are cpu and cuda")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
