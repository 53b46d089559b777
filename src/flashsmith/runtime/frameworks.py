"""CuPy's and JAX's arrays: how to look at them, where they live, and memory for what comes out.

Neither package is imported here unless the caller already holds one of its arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.runtime import driver
from flashsmith.runtime.tensors import HOST, Device, RawView, in_elements


class CupyArrays:
    """Arrays on a GPU, written in place, on CuPy's current stream."""

    name = "cupy"

    def owns(self, kind: type) -> bool:
        """Whether arrays of type ``kind`` are CuPy's."""
        return kind.__module__.partition(".")[0] == "cupy" and kind.__name__ == "ndarray"

    def view(self, name: str, array: Any) -> RawView:
        """CuPy says of its arrays what NumPy does, strides in bytes among it."""
        strides = in_elements(name, "cupy", array.strides, max(array.itemsize, 1))
        device = Device("cuda", array.device.id)
        return RawView("cupy", array.dtype, array.shape, strides, array.data.ptr, device, True)

    def allocate(self, like: Any, shape: tuple[int, ...], dtype: np.dtype, poisoned: bool) -> Any:
        """A dense array beside ``like``."""
        import cupy

        with like.device:
            return cupy.full(shape, math.nan, dtype) if poisoned else cupy.empty(shape, dtype)

    def address(self, array: Any) -> int:
        """Where the first element lies."""
        return int(array.data.ptr)

    def current_stream(self, ordinal: int) -> int:
        """Handle of CuPy's current stream on GPU ``ordinal``."""
        import cupy

        with cupy.cuda.Device(ordinal):
            return int(cupy.cuda.get_current_stream().ptr)

    def is_capturing(self, ordinal: int) -> bool:
        """Whether that stream captures a CUDA graph."""
        import cupy

        with cupy.cuda.Device(ordinal):
            return bool(cupy.cuda.get_current_stream().is_capturing())

    def finish(self, ordinal: int) -> None:
        """Nothing to wait for: what CuPy does next is behind the kernel on the same stream."""


class JaxArrays:
    """Arrays that nobody changes once they are there, on a GPU or the host.

    JAX lends out neither its streams nor unfinished results: inputs are waited for, and so is the
    kernel, on the default stream. Outputs are JAX arrays that nobody has seen yet, filled once.
    """

    name = "jax"

    def owns(self, kind: type) -> bool:
        """Whether arrays of type ``kind`` are JAX's; what jit traces are none."""
        return kind.__module__.partition(".")[0] in ("jax", "jaxlib") and any(
            base.__name__ == "ArrayImpl" for base in kind.__mro__
        )

    def view(self, name: str, array: Any) -> RawView:
        """Through DLPack. Raises ArgumentError for an array that is spread over several devices."""
        import tvm_ffi

        array.block_until_ready()
        if len(array.devices()) != 1:
            raise ArgumentError(
                f"{name}: lives on {len(array.devices())} devices; give an array of one device"
            )
        lent = tvm_ffi.from_dlpack(array)
        (platform,) = {device.platform for device in array.devices()}
        if platform not in ("cpu", "gpu"):
            raise ArgumentError(f"{name}: lives on a {platform}; allowed are cpu and gpu")
        device = HOST if platform == "cpu" else Device("cuda", int(lent.device.index))
        strides = tuple(int(stride) for stride in lent.strides)
        return RawView("jax", array.dtype, array.shape, strides, lent.data_ptr(), device, False)

    def allocate(self, like: Any, shape: tuple[int, ...], dtype: np.dtype, poisoned: bool) -> Any:
        """A dense array beside ``like``; ready to be filled."""
        import jax.numpy

        fill = math.nan if poisoned else 0
        (device,) = like.devices()
        return jax.numpy.full(shape, fill, dtype, device=device).block_until_ready()

    def address(self, array: Any) -> int:
        """Where the first element lies."""
        return int(array.unsafe_buffer_pointer())

    def host_array(self, array: Any) -> np.ndarray:
        """A host array's memory, to be read, or filled if it came from allocate."""
        return np.asarray(_Memory(array)).view(array.dtype)

    def current_stream(self, ordinal: int) -> int:
        """The default stream."""
        return 0

    def is_capturing(self, ordinal: int) -> bool:
        """The default stream cannot."""
        return False

    def finish(self, ordinal: int) -> None:
        """Waits for the kernel."""
        with driver.current_gpu(ordinal):
            driver.call("cuStreamSynchronize", None)


class _Memory:
    """A JAX host array's memory posing as an array, since JAX lends it out for reading only."""

    def __init__(self, array: Any) -> None:
        self._array = array  # keeps the memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{array.dtype.itemsize}",
            "shape": array.shape,
            "data": (array.unsafe_buffer_pointer(), False),
        }


CUPY, JAX = CupyArrays(), JaxArrays()
FRAMEWORKS: dict[str, CupyArrays | JaxArrays] = {CUPY.name: CUPY, JAX.name: JAX}
