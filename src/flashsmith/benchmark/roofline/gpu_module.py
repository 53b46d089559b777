"""Machine code loaded into a GPU through the driver, and its kernels launched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.device_array import DeviceArray

_MAX_DYNAMIC_SMEM = 8  # CUfunction_attribute, cuda.h


class GpuModule:
    """A cubin on GPU ``ordinal``; it stays loaded as long as the process lives.

    Raises LaunchError with CUDA's words when the GPU cannot load it.
    """

    def __init__(self, image: bytes, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self._module = ctypes.c_void_p()
        with driver.current_gpu(ordinal):
            driver.call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(image))

    def kernel(self, name: str, smem_bytes: int = 0) -> GpuKernel:
        """The kernel of that name, to be launched with so much dynamic shared memory.

        Raises LaunchError when there is none, or the GPU has less.
        """
        function = ctypes.c_void_p()
        with driver.current_gpu(self.ordinal):
            driver.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            driver.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SMEM, smem_bytes)
        return GpuKernel(function, smem_bytes, self.ordinal)


@dataclass(frozen=True)
class GpuKernel:
    """A kernel and what all of its launches have in common."""

    function: ctypes.c_void_p
    smem_bytes: int
    ordinal: int

    def launch(self, ctas: int, threads: int, *arguments: Any) -> None:
        """Enqueues ``ctas`` CTAs on the default stream; does not wait.

        Arguments are DeviceArrays, passed by address, and ctypes numbers.

        Raises LaunchError with CUDA's words when the launch is refused.
        """
        values: list[Any] = [
            ctypes.c_uint64(value.address) if isinstance(value, DeviceArray) else value
            for value in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        with driver.current_gpu(self.ordinal):
            driver.call(
                "cuLaunchKernel",
                self.function,
                *(ctypes.c_uint(n) for n in (ctas, 1, 1, threads, 1, 1, self.smem_bytes)),
                ctypes.c_void_p(),
                pointers,
                ctypes.c_void_p(),
            )
