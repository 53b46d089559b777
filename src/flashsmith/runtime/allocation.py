"""Memory for outputs, in the inputs' framework and place, and host tensors as NumPy arrays."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from flashsmith.families import DType
from flashsmith.runtime.device_array import DeviceArray
from flashsmith.runtime.frameworks import FRAMEWORKS, JAX
from flashsmith.runtime.tensors import TensorView

_NUMPY = {
    DType.FP16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    None: np.dtype(np.float32),
}


def allocate(
    like: TensorView, shape: tuple[int, ...], *, float32: bool = False, poisoned: bool = False
) -> Any:
    """A dense tensor of ``like``'s framework and device, and dtype unless ``float32``.

    Uninitialised, or NaN throughout when ``poisoned``, so that what a kernel leaves out shows.
    """
    dtype = _NUMPY[None if float32 else like.dtype]
    if like.framework == "torch":
        return _allocate_torch(like.source, shape, float32, poisoned)
    if like.framework == "numpy":
        return np.full(shape, math.nan, dtype) if poisoned else np.empty(shape, dtype)
    if like.framework in FRAMEWORKS:
        return FRAMEWORKS[like.framework].allocate(like.source, shape, dtype, poisoned)
    if poisoned:
        return DeviceArray.from_host(np.full(shape, math.nan, dtype), like.device.ordinal)
    return DeviceArray.empty(shape, dtype, like.device.ordinal)


def _allocate_torch(like: Any, shape: tuple[int, ...], float32: bool, poisoned: bool) -> Any:
    import torch

    dtype = torch.float32 if float32 else like.dtype
    if poisoned:
        return torch.full(shape, math.nan, dtype=dtype, device=like.device)
    if not float32 and shape == like.shape:
        # Half the time of empty().
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=dtype, device=like.device)


def address_of(tensor: Any) -> int:
    """Where the first element of an allocated tensor lies."""
    if isinstance(tensor, np.ndarray):
        return int(tensor.__array_interface__["data"][0])
    if isinstance(tensor, DeviceArray):
        return tensor.address
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    (framework,) = (f for f in FRAMEWORKS.values() if f.owns(type(tensor)))
    return framework.address(tensor)


def host_array(tensor: Any) -> np.ndarray:
    """A host tensor's own memory as a NumPy array (bf16 as ml_dtypes'); nothing is copied."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if JAX.owns(type(tensor)):
        return JAX.host_array(tensor)
    import torch

    if tensor.dtype is torch.bfloat16:
        # torch hands no bfloat16 to NumPy: the bits travel as integers.
        bits: np.ndarray = tensor.detach().view(torch.int16).numpy()
        return bits.view(_NUMPY[DType.BF16])
    array: np.ndarray = tensor.detach().numpy()
    return array
