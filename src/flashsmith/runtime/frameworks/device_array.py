"""A dense array in GPU memory, for machines that have a GPU but no PyTorch."""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import numpy as np

from flashsmith.errors import FlashsmithError
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.base import (
    Device,
    Framework,
    TensorView,
    Workspace,
    contiguous_strides,
)


def _free(ordinal: int, address: int) -> None:
    # At interpreter exit the driver, and with it the memory, may already be gone.
    try:
        with driver.current_gpu(ordinal):
            driver.call("cuMemFree_v2", ctypes.c_uint64(address))
    except FlashsmithError:
        pass


class DeviceArray:
    """A row-major array of ``shape`` and NumPy ``dtype`` on GPU ``ordinal``; freed with the object.

    Copies run on the default stream and have finished when the call returns.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, ordinal: int, address: int) -> None:
        self.shape, self.dtype, self.ordinal, self.address = shape, dtype, ordinal, address
        weakref.finalize(self, _free, ordinal, address)

    def __reduce__(self) -> Any:
        # A copied or unpickled array gets its own memory, so that two arrays never free the same
        # address.
        return DeviceArray.from_host, (self.to_host(), self.ordinal)

    def __repr__(self) -> str:
        return f"DeviceArray({self.shape}, {self.dtype}, ordinal={self.ordinal})"

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: np.dtype, ordinal: int = 0) -> DeviceArray:
        """Allocates uninitialised memory. Raises LaunchError when the GPU has too little memory."""
        address = ctypes.c_uint64()
        size = max(1, math.prod(shape) * dtype.itemsize)
        with driver.current_gpu(ordinal):
            driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return cls(shape, dtype, ordinal, address.value)

    @classmethod
    def from_host(cls, array: np.ndarray, ordinal: int = 0) -> DeviceArray:
        """Returns a copy of ``array`` on the GPU."""
        dense = np.ascontiguousarray(array)
        copy = cls.empty(dense.shape, dense.dtype, ordinal)
        with driver.current_gpu(ordinal):
            driver.call(
                "cuMemcpyHtoD_v2",
                ctypes.c_uint64(copy.address),
                ctypes.c_void_p(dense.__array_interface__["data"][0]),
                ctypes.c_size_t(dense.nbytes),
            )
        return copy

    def to_host(self) -> np.ndarray:
        """Returns a copy on the host, made after all work on the default stream has finished.

        Raises LaunchError with CUDA's message when an earlier kernel failed.
        """
        array = np.empty(self.shape, dtype=self.dtype)
        with driver.current_gpu(self.ordinal):
            driver.call("cuCtxSynchronize")
            driver.call(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(array.__array_interface__["data"][0]),
                ctypes.c_uint64(self.address),
                ctypes.c_size_t(array.nbytes),
            )
        return array


class DeviceArrays(Framework):
    """The adapter for DeviceArray."""

    name = "flashsmith"

    @classmethod
    def owns(cls, kind: type) -> bool:
        return issubclass(kind, DeviceArray)

    def view(self, name: str, tensor: Any) -> TensorView:
        dtype, device = self.dtype_names.get(tensor.dtype, ""), Device("cuda", tensor.ordinal)
        shape, address = tensor.shape, tensor.address
        strides = contiguous_strides(shape)
        return TensorView(name, self, dtype, shape, strides, address, device, True, tensor)

    def allocate(
        self, like: Any, shape: tuple[int, ...], dtype: str | None = None, *, poisoned: bool = False
    ) -> DeviceArray:
        own = like.dtype if dtype is None else self.dtypes[dtype]
        if poisoned:
            return DeviceArray.from_host(np.full(shape, math.nan, own), like.ordinal)
        return DeviceArray.empty(shape, own, like.ordinal)

    def address(self, tensor: DeviceArray) -> int:
        return tensor.address

    def as_numpy(self, tensor: DeviceArray) -> np.ndarray:
        return tensor.to_host()

    def dense_copy(self, tensor: Any) -> Any:
        return DeviceArray.from_host(tensor.to_host(), tensor.ordinal)

    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        return stream_ordered_workspace(nbytes, device, stream)


class _StreamOrderedBlock:
    """Memory that is freed to the driver's pool in stream order."""

    def __init__(self, nbytes: int, ordinal: int, stream: int) -> None:
        address = ctypes.c_uint64()
        with driver.current_gpu(ordinal):
            driver.call(
                "cuMemAllocAsync",
                ctypes.byref(address),
                ctypes.c_size_t(nbytes),
                ctypes.c_void_p(stream),
            )
        self.address = address.value
        weakref.finalize(self, _free_in_order, ordinal, self.address, stream)


def _free_in_order(ordinal: int, address: int, stream: int) -> None:
    try:
        with driver.current_gpu(ordinal):
            driver.call("cuMemFreeAsync", ctypes.c_uint64(address), ctypes.c_void_p(stream))
    except FlashsmithError:
        pass  # as in _free


def stream_ordered_workspace(nbytes: int, device: Device, stream: int) -> Workspace:
    """Returns a workspace from the driver's own pool or, while ``stream`` is capturing, from the
    graph's pool.

    Raises LaunchError when there is not enough memory.
    """
    block = _StreamOrderedBlock(nbytes, device.ordinal, stream)
    return Workspace(block.address, block)
