"""One look at a tensor, whoever made it: PyTorch, NumPy or flashsmith's own GPU arrays.

PyTorch is never imported here unless the caller already holds one of its tensors.
"""

from __future__ import annotations

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
    if isinstance(tensor, np.ndarray):
        return _view_numpy(name, tensor)
    if isinstance(tensor, DeviceArray):
        return _view_device_array(name, tensor)
    if is_torch_tensor(tensor):
        return _view_torch(name, tensor)
    raise ArgumentError(
        f"{name}: got {type(tensor).__module__}.{type(tensor).__qualname__}; "
        "give a PyTorch tensor or a NumPy array"
    )


def is_torch_tensor(value: object) -> bool:
    """Whether ``value`` is a torch.Tensor, found without importing torch."""
    return any(
        base.__name__ == "Tensor" and base.__module__.partition(".")[0] == "torch"
        for base in type(value).__mro__
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


def _view_torch(name: str, tensor: Any) -> TensorView:
    import torch

    if tensor.dtype is torch.float16:
        dtype = DType.FP16
    elif tensor.dtype is torch.bfloat16:
        dtype = DType.BF16
    else:
        raise _bad_dtype(name, tensor.dtype)
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{name}: layout {tensor.layout}; give a strided (dense) tensor")
    place = tensor.device
    if place.type == "cuda":
        device = Device("cuda", place.index)
    elif place.type == "cpu":
        device = HOST
    else:
        raise ArgumentError(f"{name}: lives on device {place}; allowed are cpu and cuda")
    shape, strides = tuple(tensor.shape), tensor.stride()
    return TensorView(name, "torch", dtype, shape, strides, tensor.data_ptr(), device, True, tensor)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
