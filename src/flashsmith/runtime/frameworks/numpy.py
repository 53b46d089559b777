"""The adapter for NumPy's arrays, which are on the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.runtime.frameworks.base import (
    HOST,
    Device,
    Framework,
    TensorView,
    Workspace,
    host_workspace,
    in_elements,
)


class NumpyArrays(Framework):
    """Arrays of numpy.ndarray or a derived class."""

    name = "numpy"

    @classmethod
    def owns(cls, kind: type) -> bool:
        return issubclass(kind, np.ndarray)

    def view(self, name: str, tensor: Any) -> TensorView:
        if isinstance(tensor, np.ma.MaskedArray):
            raise ArgumentError(
                f"{name}: is a masked array, and kernels ignore masks; give its .filled()"
            )
        strides = in_elements(name, "numpy", tensor.strides, max(tensor.itemsize, 1))
        address, read_only = tensor.__array_interface__["data"]
        dtype = self.dtype_names.get(tensor.dtype, "")
        return TensorView(
            name, self, dtype, tensor.shape, strides, address, HOST, not read_only, tensor
        )

    def allocate(
        self, like: Any, shape: tuple[int, ...], dtype: str | None = None, *, poisoned: bool = False
    ) -> np.ndarray:
        own = like.dtype if dtype is None else self.dtypes[dtype]
        return np.full(shape, math.nan, own) if poisoned else np.empty(shape, own)

    def address(self, tensor: Any) -> int:
        return int(tensor.__array_interface__["data"][0])

    def as_numpy(self, tensor: np.ndarray) -> np.ndarray:
        return tensor

    def dense_copy(self, tensor: Any) -> Any:
        return np.array(tensor, order="C")

    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        return host_workspace(nbytes)
