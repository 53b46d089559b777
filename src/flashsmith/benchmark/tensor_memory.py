"""TensorMemory: allocates a benchmark's tensors, through PyTorch on the GPU or else through the
CUDA driver."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
from collections.abc import Iterator
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from flashsmith.errors import LaunchError
from flashsmith.families import DType
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.verify.proof_inputs import numpy_dtype

Shape = tuple[int, ...]


class TensorMemory(Protocol):
    """Makes tensors on GPU 0, with standard normal contents, and copies them to the host."""

    def draw(self, shape: Shape, dtype: DType, seed: int) -> Any:
        """A dense random tensor."""

    def put(self, array: np.ndarray) -> Any:
        """A copy of a host array."""

    def fetch(self, tensor: Any) -> np.ndarray:
        """A copy on the host. Raises LaunchError if an earlier kernel failed."""

    def poison(self, tensor: Any) -> None:
        """Fills a tensor with NaN."""

    def nonfinite(self, tensor: Any) -> int:
        """The number of elements that are NaN or infinite. Raises LaunchError if an earlier kernel
        failed."""

    def head(self, tensor: Any, at: tuple[int | slice, ...], head: int) -> np.ndarray:
        """One head of the rows ``at`` of (batch, seq, heads, d) or (total, heads, d), on the host.

        The shape is (rows, d), or (blocks, rows, d) if ``at`` is a list of blocks. Raises
        LaunchError if an earlier kernel failed.
        """


class TorchMemory:
    """PyTorch's tensors, which peers accept too; random numbers are drawn on the GPU."""

    device = "cuda:0"

    def draw(self, shape: Shape, dtype: DType, seed: int) -> Any:
        import torch

        generator = torch.Generator(self.device).manual_seed(seed)
        kind = torch.bfloat16 if dtype is DType.BF16 else torch.float16
        return torch.randn(shape, generator=generator, device=self.device, dtype=kind)

    def put(self, array: np.ndarray) -> Any:
        import torch

        if array.dtype == ml_dtypes.bfloat16:
            # torch cannot convert bfloat16 from NumPy, so the bits are passed as integers.
            bits = torch.from_numpy(array.view(np.int16)).to(self.device)
            return bits.view(torch.bfloat16)
        return torch.from_numpy(array).to(self.device)

    def fetch(self, tensor: Any) -> np.ndarray:
        import torch

        with _failures_as_launch_errors():
            host = tensor.contiguous().cpu()
        if host.dtype is torch.bfloat16:
            bits: np.ndarray = host.view(torch.int16).numpy()
            return bits.view(ml_dtypes.bfloat16)
        numbers: np.ndarray = host.numpy()
        return numbers

    def poison(self, tensor: Any) -> None:
        tensor.fill_(math.nan)

    def nonfinite(self, tensor: Any) -> int:
        import torch

        with _failures_as_launch_errors():
            # Both extremes are NaN if any element is NaN. Unlike isfinite() of the whole tensor,
            # this allocates no memory of the tensor's size.
            ends = torch.stack(torch.aminmax(tensor))
            if torch.isfinite(ends).all():
                return 0
            return int(tensor.numel() - torch.isfinite(tensor).sum())

    def head(self, tensor: Any, at: tuple[int | slice, ...], head: int) -> np.ndarray:
        return self.fetch(tensor[at][..., head, :])


@contextlib.contextmanager
def _failures_as_launch_errors() -> Iterator[None]:
    """Converts PyTorch's RuntimeError into a LaunchError. PyTorch raises it at the first
    synchronizing call after a kernel has failed."""
    try:
        yield
    except RuntimeError as error:
        raise LaunchError(str(error).splitlines()[0]) from None


class DriverMemory:
    """DeviceArrays that are filled from the host."""

    def draw(self, shape: Shape, dtype: DType, seed: int) -> DeviceArray:
        numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        return DeviceArray.from_host(numbers.astype(numpy_dtype(dtype)))

    def put(self, array: np.ndarray) -> DeviceArray:
        return DeviceArray.from_host(array)

    def fetch(self, tensor: DeviceArray) -> np.ndarray:
        return tensor.to_host()

    def poison(self, tensor: DeviceArray) -> None:
        # All bits set is NaN in fp16, bf16 and fp32.
        with driver.current_gpu(tensor.ordinal):
            address, size = ctypes.c_uint64(tensor.address), ctypes.c_size_t(tensor.nbytes)
            driver.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0xFF), size)

    def nonfinite(self, tensor: DeviceArray) -> int:
        return int((~np.isfinite(tensor.to_host().astype(np.float32))).sum())

    def head(self, tensor: DeviceArray, at: tuple[int | slice, ...], head: int) -> np.ndarray:
        return tensor.to_host()[at][..., head, :]


def gpu_memory() -> TensorMemory:
    """PyTorch's memory if PyTorch can use the GPU, else the driver's."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return TorchMemory()
    return DriverMemory()
