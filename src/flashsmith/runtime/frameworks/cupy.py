"""The adapter for CuPy's arrays, which are on a GPU and are used on CuPy's current stream."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashsmith.runtime.frameworks.base import Device, Framework, TensorView, Workspace, in_elements
from flashsmith.runtime.frameworks.device_array import stream_ordered_workspace


class CupyArrays(Framework):
    """CuPy arrays, which kernels write in place."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        super().__init__()
        self._cupy = cupy

    @classmethod
    def owns(cls, kind: type) -> bool:
        return kind.__module__.partition(".")[0] == "cupy" and kind.__name__ == "ndarray"

    def view(self, name: str, tensor: Any) -> TensorView:
        # CuPy's arrays have NumPy's attributes, with strides in bytes.
        strides = in_elements(name, "cupy", tensor.strides, max(tensor.itemsize, 1))
        dtype, device = self.dtype_names.get(tensor.dtype, ""), Device("cuda", tensor.device.id)
        address = tensor.data.ptr
        return TensorView(name, self, dtype, tensor.shape, strides, address, device, True, tensor)

    def allocate(
        self, like: Any, shape: tuple[int, ...], dtype: str | None = None, *, poisoned: bool = False
    ) -> Any:
        own = like.dtype if dtype is None else self.dtypes[dtype]
        with like.device:
            if poisoned:
                return self._cupy.full(shape, math.nan, own)
            return self._cupy.empty(shape, own)

    def address(self, tensor: Any) -> int:
        return int(tensor.data.ptr)

    def as_numpy(self, tensor: Any) -> np.ndarray:
        array: np.ndarray = tensor.get()
        return array

    def dense_copy(self, tensor: Any) -> Any:
        with tensor.device:
            return self._cupy.array(tensor, order="C")

    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        cuda = self._cupy.cuda
        with cuda.Device(device.ordinal):
            # CuPy's pool reuses memory in the order of the current stream, and would even reuse
            # memory that a captured graph still needs.
            is_current = cuda.get_current_stream().ptr == stream
            if is_current and not cuda.runtime.streamIsCapturing(stream):
                memory = cuda.alloc(nbytes)
                return Workspace(int(memory.ptr), memory)
        return stream_ordered_workspace(nbytes, device, stream)

    def current_stream(self, ordinal: int) -> int:
        with self._cupy.cuda.Device(ordinal):
            return int(self._cupy.cuda.get_current_stream().ptr)

    def is_capturing(self, ordinal: int) -> bool:
        with self._cupy.cuda.Device(ordinal):
            return bool(self._cupy.cuda.get_current_stream().is_capturing())
