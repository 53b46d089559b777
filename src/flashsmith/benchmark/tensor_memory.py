"""TensorMemory: allocates the tensors of a benchmark, with PyTorch on the GPU or else with the CUDA
driver."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from flashsmith.errors import LaunchError
from flashsmith.families import DType
from flashsmith.runtime import driver
from flashsmith.runtime.frameworks.base import NUMPY_DTYPES
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.semantics.cache_format import DTYPES_OF_8BIT, CacheFormat
from flashsmith.verify.proof_inputs import numpy_dtype

Shape = tuple[int, ...]
# The dtypes for which PyTorch and NumPy cannot convert each other's arrays; the bits of such
# tensors are passed as integers.
_OF_ML_DTYPES = ("bfloat16", *DTYPES_OF_8BIT)


class TensorMemory(Protocol):
    """Makes tensors on GPU 0 with standard normal values, and copies them to the host."""

    def draw(
        self, shape: Shape, dtype: DType, seed: int, cache: CacheFormat = CacheFormat.PLAIN
    ) -> Any:
        """A new tensor of random values; if ``cache`` is an fp8 format, the values are rounded to
        8-bit floats."""

    def put(self, array: np.ndarray) -> Any:
        """A new tensor with the contents of a host array."""

    def fetch(self, tensor: Any) -> np.ndarray:
        """A copy of a tensor on the host. Raises LaunchError if an earlier kernel failed."""

    def poison(self, tensor: Any) -> None:
        """Fills a tensor with NaN."""

    def nonfinite(self, tensor: Any) -> int:
        """Returns the number of elements that are NaN or infinite. Raises LaunchError if an earlier
        kernel failed."""

    def head(self, tensor: Any, at: tuple[int | slice, ...], head: int) -> np.ndarray:
        """The rows ``at`` of one head of a tensor (batch, seq, heads, d) or (total, heads, d),
        copied to the host.

        The result is (rows, d); if ``at`` is a list of blocks, (blocks, rows, d). Raises
        LaunchError if an earlier kernel failed.
        """


class TorchMemory:
    """Memory of PyTorch tensors, which peers accept too; random numbers are drawn on the GPU."""

    device = "cuda:0"

    def draw(
        self, shape: Shape, dtype: DType, seed: int, cache: CacheFormat = CacheFormat.PLAIN
    ) -> Any:
        import torch

        generator = torch.Generator(self.device).manual_seed(seed)
        kind = torch.bfloat16 if dtype is DType.BF16 else torch.float16
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=kind)
        return drawn.to(getattr(torch, cache.numpy_name)) if cache.is_8bit else drawn

    def put(self, array: np.ndarray) -> Any:
        import torch

        if array.dtype.name in _OF_ML_DTYPES:
            whole = np.int16 if array.itemsize == 2 else np.uint8
            bits = torch.from_numpy(array.view(whole)).to(self.device)
            return bits.view(getattr(torch, array.dtype.name))
        return torch.from_numpy(array).to(self.device)

    def fetch(self, tensor: Any) -> np.ndarray:
        import torch

        with _failures_as_launch_errors():
            host = tensor.contiguous().cpu()
        name = str(host.dtype).removeprefix("torch.")
        if name in _OF_ML_DTYPES:
            whole = torch.int16 if host.itemsize == 2 else torch.uint8
            bits: np.ndarray = host.view(whole).numpy()
            return bits.view(NUMPY_DTYPES[name])
        numbers: np.ndarray = host.numpy()
        return numbers

    def poison(self, tensor: Any) -> None:
        tensor.fill_(math.nan)

    def nonfinite(self, tensor: Any) -> int:
        import torch

        with _failures_as_launch_errors():
            # If any element is NaN, the minimum and the maximum are NaN. Unlike isfinite(), this
            # does not allocate another tensor of the same size.
            ends = torch.stack(torch.aminmax(tensor))
            if torch.isfinite(ends).all():
                return 0
            return int(tensor.numel() - torch.isfinite(tensor).sum())

    def head(self, tensor: Any, at: tuple[int | slice, ...], head: int) -> np.ndarray:
        return self.fetch(tensor[at][..., head, :])


@contextlib.contextmanager
def _failures_as_launch_errors() -> Iterator[None]:
    """Turns PyTorch's RuntimeError into a LaunchError.

    After a kernel has failed, PyTorch raises RuntimeError at the first call that synchronises.
    """
    try:
        yield
    except RuntimeError as error:
        raise LaunchError(str(error).splitlines()[0]) from None


class DriverMemory:
    """Memory of DeviceArrays, which are filled from the host."""

    def draw(
        self, shape: Shape, dtype: DType, seed: int, cache: CacheFormat = CacheFormat.PLAIN
    ) -> DeviceArray:
        numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        drawn = numbers.astype(numpy_dtype(dtype))
        if cache.is_8bit:
            drawn = drawn.astype(NUMPY_DTYPES[cache.numpy_name])
        return DeviceArray.from_host(drawn)

    def put(self, array: np.ndarray) -> DeviceArray:
        return DeviceArray.from_host(array)

    def fetch(self, tensor: DeviceArray) -> np.ndarray:
        return tensor.to_host()

    def poison(self, tensor: DeviceArray) -> None:
        # If all bits are set, the value is NaN in fp16, bf16 and fp32.
        with driver.current_gpu(tensor.ordinal):
            address, size = ctypes.c_uint64(tensor.address), ctypes.c_size_t(tensor.nbytes)
            driver.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0xFF), size)

    def nonfinite(self, tensor: DeviceArray) -> int:
        return int((~np.isfinite(tensor.to_host().astype(np.float32))).sum())

    def head(self, tensor: DeviceArray, at: tuple[int | slice, ...], head: int) -> np.ndarray:
        return tensor.to_host()[at][..., head, :]


def gpu_memory() -> TensorMemory:
    """The memory with PyTorch tensors if PyTorch can use the GPU, otherwise the memory with
    DeviceArrays."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return TorchMemory()
    return DriverMemory()
