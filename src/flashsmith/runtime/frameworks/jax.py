"""The adapter for JAX's arrays, which are on a GPU or the host and are used on the default
stream."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.base import (
    HOST,
    Device,
    Framework,
    HostMemory,
    TensorView,
    Workspace,
    host_workspace,
)
from flashsmith.runtime.frameworks.device_array import stream_ordered_workspace


class JaxArrays(Framework):
    """JAX's immutable arrays.

    JAX exposes neither its streams nor results that are still being computed. So a call waits until
    its inputs are ready, launches on the default stream, and waits for the kernel. Outputs are new
    JAX arrays, which the kernel writes in place before they are returned.
    """

    name = "jax"

    @classmethod
    def owns(cls, kind: type) -> bool:
        return kind.__module__.partition(".")[0] in ("jax", "jaxlib") and any(
            base.__name__ == "ArrayImpl" for base in kind.__mro__
        )

    @classmethod
    def refusal(cls, kind: type) -> str | None:
        if kind.__module__.partition(".")[0] != "jax" or "Tracer" not in str(kind.__mro__):
            return None
        return (
            f"is a tracer of a JAX transformation ({kind.__qualname__}), not an array; "
            "flashsmith's calls cannot be traced: make them outside of jax.jit, jax.vmap and the "
            "other transformations, on arrays; only attention() can be differentiated, once, by "
            "jax.grad or jax.vjp, not in forward mode"
        )

    def view(self, name: str, tensor: Any) -> TensorView:
        import tvm_ffi

        tensor.block_until_ready()
        if len(tensor.devices()) != 1:
            raise ArgumentError(
                f"{name}: lives on {len(tensor.devices())} devices; give an array of one device"
            )
        lent = tvm_ffi.from_dlpack(tensor)
        (platform,) = {device.platform for device in tensor.devices()}
        if platform not in ("cpu", "gpu"):
            raise ArgumentError(f"{name}: lives on a {platform}; allowed are cpu and gpu")
        device = HOST if platform == "cpu" else Device("cuda", int(lent.device.index))
        strides = tuple(int(stride) for stride in lent.strides)
        dtype, address = self.dtype_names.get(tensor.dtype, ""), self.address(tensor)
        return TensorView(name, self, dtype, tensor.shape, strides, address, device, False, tensor)

    def allocate(
        self, like: Any, shape: tuple[int, ...], dtype: str | None = None, *, poisoned: bool = False
    ) -> Any:
        import jax.numpy

        own = like.dtype if dtype is None else self.dtypes[dtype]
        fill = math.nan if poisoned else 0
        (device,) = like.devices()
        return jax.numpy.full(shape, fill, own, device=device).block_until_ready()

    def address(self, tensor: Any) -> int:
        return int(tensor.unsafe_buffer_pointer())

    def as_numpy(self, tensor: Any) -> np.ndarray:
        (device,) = tensor.devices()
        if device.platform != "cpu":
            return np.asarray(tensor)
        # Memory from allocate() may be written, although JAX exports it as read-only.
        itemsize = tensor.dtype.itemsize
        memory = HostMemory(self.address(tensor), tensor.shape, itemsize, owner=tensor)
        return np.asarray(memory).view(tensor.dtype)

    def dense_copy(self, tensor: Any) -> Any:
        import jax.numpy

        return jax.numpy.array(tensor, copy=True).block_until_ready()

    def workspace(self, nbytes: int, device: Device, stream: int) -> Workspace:
        if device == HOST:
            return host_workspace(nbytes)
        return stream_ordered_workspace(nbytes, device, stream)

    def finish(self, ordinal: int) -> None:
        with driver.current_gpu(ordinal):
            driver.call("cuStreamSynchronize", None)
